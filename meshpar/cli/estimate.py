"""Estimate memory, time and communication of one layout on a machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields

from meshpar.cli.options import (
    add_counts,
    add_layout_and_workload,
    chosen_cluster,
    chosen_workload,
)
from meshpar.cli.plan_options import add_table_arguments, is_other, other_request
from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.planner.cost.estimate import Estimate, estimate
from meshpar.planner.inference import estimate_inference, inference_lines
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.execution import execution_of
from meshpar.planner.search.space import Constraints
from meshpar.planner.workload.workload import Workload

EXAMPLE = (
    "meshpar estimate --model llama3-70b --seq 8192 --global-batch 64 "
    "--layout fsdp=8,tensor=8,remat=full,precision=bf16"
)
STATUSES = "0 it fits, 1 it does not, 2 bad input"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add_counts(
        parser,
        {
            "--slots": "estimate generation instead, with N requests at once, each of "
            "--seq tokens (default: training)",
            "--prompt": "with --slots: tokens per prompt (default: half of --seq)",
        },
    )
    add_layout_and_workload(parser)
    parser.add_argument(
        "--mesh-order",
        metavar="AXES",
        help="mesh axes from the slowest link to the fastest, such as "
        "stage,data,tensor (default: the layout's)",
    )
    add_table_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the estimate; return 0 if it fits, 1 if it does not."""
    layout = Layout.parse(args.layout)
    cluster = chosen_cluster(args, layout)
    if args.mesh_order is not None and (args.slots is not None or is_other(args)):
        raise InputError(
            "--mesh-order applies to training of transformers; leave it out",
            key="command.mesh_order_of_others",
        )
    if args.slots is not None and not is_other(args):
        return _estimate_generation(args, layout, cluster)
    if args.prompt is not None:
        raise InputError(
            "--prompt applies to generation; give --slots too, or leave it out",
            key="command.prompt_without_slots",
        )
    if is_other(args):
        batch = args.global_batch or _smallest_batch(layout, cluster)
        kept = _kept(layout.resolve(cluster.num_devices))
        plan, fits = other_request(args, cluster, kept, batch).kept_plan()
    else:
        plan = estimated(args, chosen_workload(args), layout, cluster)
        fits = plan.fits
    print(json.dumps(plan.as_json()) if args.json else "\n".join(plan.lines))
    return 0 if fits else 1


def _kept(layout: Layout) -> Constraints:
    """Return all values that a layout gives, as constraints of a search."""
    given = {
        field.name: getattr(layout, field.name)
        for field in fields(Layout)
        if getattr(layout, field.name) != getattr(Layout(), field.name)
    }
    return Constraints(
        kept={**layout.mesh_shape, "precision": layout.precision, **given}
    )


def _estimate_generation(
    args: argparse.Namespace, layout: Layout, cluster: Cluster
) -> int:
    workload = chosen_workload(args)
    found = estimate_inference(
        workload,
        cluster,
        layout,
        slots=args.slots,
        seq=args.seq or workload.seq,
        prompt=args.prompt or 0,
    )
    text = "\n".join(inference_lines(found))
    print(json.dumps(found.as_json()) if args.json else text)
    return 0 if found.fits else 1


def estimated(
    args: argparse.Namespace, workload: Workload, layout: Layout, cluster: Cluster
) -> Estimate:
    """Return the planner's estimate of a layout, by default of its smallest batch.

    Raises:
        InputError: The layout does not suit the workload.
    """
    return estimate(
        workload,
        cluster,
        layout,
        global_batch=args.global_batch or _smallest_batch(layout, cluster),
        seq=args.seq,
        execution=execution_of(args.execution),
        order=getattr(args, "mesh_order", None),
    )


def _smallest_batch(layout: Layout, cluster: Cluster) -> int:
    """Return the batch of one sequence a microbatch and device."""
    layout = layout.resolve(cluster.num_devices)
    return layout.batch_shards * layout.microbatches
