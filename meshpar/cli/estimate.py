"""Says what one layout takes on a machine: memory, time, communication."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields

from meshpar.cli.parsing import add_counts, check_sizes
from meshpar.cli.plan_other import (
    add_table_arguments,
    is_other,
    other_request,
    run_estimate,
)
from meshpar.errors import InputError
from meshpar.hardware.devices import DEVICES
from meshpar.layout import Layout
from meshpar.planner.cost.estimate import Estimate, estimate
from meshpar.planner.cost.in_words import estimate_in_words
from meshpar.planner.inference import estimate_inference, inference_lines
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import (
    EXECUTIONS,
    MESHPAR,
    execution_of,
)
from meshpar.planner.search.constraints import Constraints
from meshpar.planner.workload.shapes import OTHER_SHAPES, SHAPES, workload_of
from meshpar.planner.workload.workload import Workload
from meshpar.train.layout_refusals import layout_errors

_MOST_DEVICES = 1_000_000
"""Beyond any machine, and as many as a search can factor."""

EXAMPLE = (
    "meshpar estimate --model llama3-70b --seq 8192 --global-batch 64 "
    "--layout fsdp=8,tensor=8,remat=full,precision=bf16"
)
STATUSES = "0 it fits, 1 it does not, 2 bad input"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subcommand's options."""
    add_counts(
        parser,
        {
            "--slots": "of generation instead of training: requests that run at once, "
            "each of --seq tokens (default: training)",
            "--prompt": "with --slots: tokens of a prompt (default: half of --seq)",
        },
    )
    add_layout_and_workload(parser)
    add_table_arguments(parser)


def add_layout_and_workload(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose a layout, a model, a machine and a batch."""
    parser.add_argument(
        "--layout",
        metavar="LINE",
        required=True,
        help="fsdp=8,stage=2,tensor=8,... (required)",
    )
    add_workload_arguments(parser)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose a model, a machine and a batch."""
    parser.add_argument(
        "--preset", metavar="NAME", help="a named model: llama3-8b, gpt3-175b, ..."
    )
    parser.add_argument(
        "--model",
        metavar="NAME|FILE.json|SIZES",
        help="a named model, a Hugging Face config.json, or layers=4,hidden=256,... "
        "(with --preset: what differs from it)",
    )
    vocab = "tokens of the vocabulary (default: the model's own)"
    add_counts(parser, {"--vocab": vocab})
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE.toml",
        default="h100-80gb",
        help=f"{', '.join(DEVICES)}; with a torus tpu-v5p:4x4x8 (default: %(default)s)",
    )
    add_counts(
        parser,
        {
            "--devices": "devices of all hosts (default: those of --layout, or of the "
            "torus)",
            "--hosts": "hosts, or slices of a TPU (default: as few as hold the "
            "devices)",
            "--global-batch": "sequences in a step (default: one a microbatch and "
            "device; plan needs it given)",
            "--seq": "tokens of a sequence (default: the model's own)",
        },
    )
    parser.add_argument(
        "--execution",
        default=MESHPAR.name,
        metavar="NAME",
        help=f"the program that runs it: {', '.join(EXECUTIONS)}, "
        "or a .toml file (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the estimate; 0 if it fits, 1 if it does not."""
    layout = Layout.parse(args.layout)
    cluster = cluster_for(args, layout)
    if args.slots is not None and not is_other(args):
        return _of_generation(args, layout, cluster)
    if args.prompt is not None:
        raise InputError(
            "--prompt is of generation; give --slots too, or leave it out",
            key="command.prompt_without_slots",
        )
    if is_other(args):
        batch = args.global_batch or _smallest_batch(layout, cluster)
        kept = _kept(layout.resolve(cluster.num_devices))
        return run_estimate(args, other_request(args, cluster, kept, batch))
    workload = workload_for(args)
    if not execution_of(args.execution).eager:
        for error in layout_errors(layout.resolve(cluster.num_devices)).values():
            raise error
    found = estimated(args, workload, layout, cluster)
    text = "\n".join(estimate_in_words(found))
    print(json.dumps(found.as_json()) if args.json else text)
    return 0 if found.fits else 1


def _kept(layout: Layout) -> Constraints:
    """All that a layout says, as what a search must keep."""
    said = {
        field.name: getattr(layout, field.name)
        for field in fields(Layout)
        if getattr(layout, field.name) != getattr(Layout(), field.name)
    }
    return Constraints(
        kept={**layout.mesh_shape, "precision": layout.precision, **said}
    )


def _of_generation(args: argparse.Namespace, layout: Layout, cluster: Cluster) -> int:
    workload = workload_for(args)
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
    """The planner's estimate of a layout, of its smallest batch where none is given.

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
    )


def workload_for(args: argparse.Namespace) -> Workload:
    """The workload of the options.

    Raises:
        InputError: None is chosen, or it does not exist.
    """
    if args.preset is None and args.model is None:
        raise InputError(
            "no model is chosen; give --preset NAME or --model SIZES",
            key="command.no_model",
        )
    words = None if args.vocab is None else f"vocab={args.vocab}"
    if args.preset is None:
        return workload_of(args.model, words=words)
    changed = [part for part in (args.model, words) if part]
    return workload_of(args.preset, words=",".join(changed) or None)


def train_model(args: argparse.Namespace) -> tuple[str | None, str | None]:
    """`--preset` and `--model` of `meshpar train` that build the model planned for."""
    preset, sizes = args.preset, args.model
    if sizes in SHAPES or sizes in OTHER_SHAPES:
        preset, sizes = sizes, None
    vocab = None if args.vocab is None else f"vocab={args.vocab}"
    return preset, ",".join(part for part in (sizes, vocab) if part) or None


def cluster_for(args: argparse.Namespace, layout: Layout | None = None) -> Cluster:
    """The cluster of the options; as many devices as the layout needs by default.

    Raises:
        InputError: Unknown hardware, or counts that do not fit together.
    """
    devices = args.devices
    if devices is None and layout is not None and ":" not in args.hardware:
        check_sizes(layout)
        devices = layout.num_devices
    if max(devices or 0, args.hosts or 0) > _MOST_DEVICES:
        raise InputError(
            f"{devices or args.hosts} devices or hosts: give at most {_MOST_DEVICES}",
            key="command.too_many_devices",
        )
    return cluster_of(args.hardware, devices=devices, hosts=args.hosts)


def _smallest_batch(layout: Layout, cluster: Cluster) -> int:
    """One sequence of every microbatch on every device."""
    layout = layout.resolve(cluster.num_devices)
    return layout.batch_shards * layout.microbatches
