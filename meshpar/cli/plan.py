"""Searches layouts for a model on a machine; or says how wrong the planner has been."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshpar.cli.estimate import (
    add_workload_arguments,
    cluster_for,
    train_model,
    workload_for,
)
from meshpar.cli.measure import Measured, check_measurable, measure
from meshpar.cli.parsing import above_zero, add_counts, option_words, positive
from meshpar.cli.plan_curve import add_curve_arguments, check_curve, run_curve
from meshpar.cli.plan_other import (
    add_table_arguments,
    is_other,
    other_request,
    run_other,
)
from meshpar.cli.plan_training import add_training_arguments, training_of
from meshpar.cli.report.destination import PAGES, check_picture, output_file
from meshpar.cli.words_to_train import words_to_train
from meshpar.errors import InputError, local_path
from meshpar.layout import MESH_AXES
from meshpar.planner.cost.estimate import (
    Estimate,
    at_half_network_s,
    gigabytes,
    milliseconds,
)
from meshpar.planner.cost.in_words import estimate_in_words
from meshpar.planner.machine.execution import execution_of
from meshpar.planner.plan import PlanRequest
from meshpar.planner.published import validate
from meshpar.planner.search.constraints import Constraints
from meshpar.planner.search.nearest_fit import nearest_fit
from meshpar.planner.search.search import Request, SearchResult, search
from meshpar.planner.search.sensitivity import sensitivities
from meshpar.planner.search.training_cost import TrainingCost, training_cost
from meshpar.planner.workload.shapes import OTHER_SHAPES, PUBLISHED

if TYPE_CHECKING:  # It needs jax.
    from meshpar.cli.confirm import Confirmed

_GIB = 1 << 30
_PLANS = 10
_SHOWN = 12
"""Rejected layouts that people see; --json has more."""


EXAMPLE = "meshpar plan --model llama3-8b --devices 64 --seq 8192 --global-batch 256"
STATUSES = (
    "0 something fits, 1 nothing does (--validate: an error is too large), 2 bad input"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subcommand's options."""
    add_workload_arguments(parser)
    add = parser.add_argument
    add(
        "--keep",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="what every layout must have, such as tensor=8 or remat=full; may be "
        "repeated",
    )
    add("--layout", metavar="LINE", help="the same as --keep: what it says is kept")
    add(
        "--forbid",
        action="append",
        default=[],
        metavar="AXIS",
        help=f"a mesh axis to leave at size 1: {', '.join(MESH_AXES)}; may be repeated",
    )
    add(
        "--sync-every",
        type=positive,
        metavar="H",
        help="the same as --keep sync_every=H: replicas over 'data' average their "
        "parameters after every H steps, for slow links between sites",
    )
    add(
        "--max-memory-gib",
        type=above_zero,
        metavar="G",
        help="memory of a device to use at most (default: all that a program can have)",
    )
    add(
        "--axes",
        choices=("built", "planned"),
        default="built",
        help="mesh axes to use: both mean all of them, since make_train_step lays out "
        "each",
    )
    add_counts(parser, {"--plans": f"plans to print (default: {_PLANS})"})
    add(
        "--confirm",
        type=positive,
        metavar="K",
        help="compile the first K for the machine, which need not be there, and print "
        "predicted against compiled bytes",
    )
    add(
        "--measure",
        type=positive,
        metavar="K",
        help="run some steps of the first K on this machine's devices, or on virtual "
        "ones where --hardware is a CPU's file; print predicted against measured, and "
        "the efficiency that fits (default: nothing is run)",
    )
    add_training_arguments(parser)
    add_curve_arguments(parser)
    add_table_arguments(parser)
    add(
        "--html",
        type=output_file,
        metavar="FILE",
        help="write a report in one file, plot included (needs meshpar[plots])",
    )
    add(
        "--validate",
        action="store_true",
        help="instead: print the planner's error against published runs, row by row",
    )


def run(args: argparse.Namespace) -> int:
    """Prints plans; 0 if there are any, 1 if nothing fits or an error is too large."""
    if args.html:
        check_picture("--html", args.html, PAGES)
    if args.validate:
        rows = validate.rows()
        print(json.dumps(validate.as_json(rows)) if args.json else validate.text(rows))
        return 0 if all(summary.met for summary in validate.summaries(rows)) else 1
    check_curve(args)
    request = _any_request(args)
    if args.curve is not None:
        return run_curve(args, request)
    if not isinstance(request, Request):
        return run_other(args, request)
    training = training_of(args)
    if args.measure is not None:
        check_measurable(request.cluster)
    found = search(request, num_plans=args.plans or _PLANS)
    if not found.plans:
        return _nothing_fits(args, request, found)
    costs = [training_cost(plan, training) for plan in found.plans if training]
    measured = None
    if args.measure is not None:
        measured = measure(args, found.plans[: args.measure])
    confirmed = []
    if args.confirm is not None:
        from meshpar.cli.confirm import confirm  # jax, which nothing else here needs

        confirmed = confirm(args, found.plans[: args.confirm])
    if not args.json:
        lines = [*_text(found, costs), "", _how_to_run(args, found.plans[0])]
        for one in confirmed:
            lines += ["", *one.lines()]
        if measured:
            lines += ["", *measured.lines()]
        print("\n".join(lines))
    if args.html:  # after the text: what cannot be written loses nothing of it
        from meshpar.cli.report.plan_page import plan_page

        page = plan_page(found, confirmed, costs, measured)
        local_path("--html", args.html).write_text(page, encoding="utf-8")
    if args.json:  # last: an error is the one object
        print(json.dumps(_report(found, costs, confirmed, measured)))
    return 0


def _report(
    found: SearchResult,
    costs: Sequence[TrainingCost],
    confirmed: Sequence[Confirmed],
    measured: Measured | None,
) -> dict[str, Any]:
    """What `--json` prints."""
    report: dict[str, Any] = found.as_json()
    best = found.plans[0]
    report["sensitivity"] = [change.as_json() for change in sensitivities(best)]
    for plan, cost in zip(report["plans"], costs, strict=False):
        plan["training"] = cost.as_json()
    if confirmed:
        report["confirmed"] = [one.as_json() for one in confirmed]
    if measured is not None:
        report.update(measured.as_json())
    return report


def _any_request(args: argparse.Namespace) -> Request | PlanRequest:
    """What is planned: a transformer, or another model."""
    if args.global_batch is None:
        raise InputError(
            "a plan depends on the batch; give --global-batch N, in sequences of --seq",
            key="plan.no_batch",
        )
    if is_other(args):
        cluster, constraints = cluster_for(args), _constraints(args)
        return other_request(args, cluster, constraints, args.global_batch)
    workload = workload_for(args)
    return Request(
        workload=workload,
        cluster=cluster_for(args),
        global_batch=args.global_batch,
        seq=args.seq or workload.seq,
        execution=execution_of(args.execution),
        constraints=_constraints(args),
    )


def _constraints(args: argparse.Namespace) -> Constraints:
    """What every layout must have, by options or by lines of a layout."""
    every, limit = args.sync_every, args.max_memory_gib
    by_options = [args.layout, None if every is None else f"sync_every={every}"]
    return Constraints.of(
        keep=[*args.keep, *filter(None, by_options)],
        forbid=args.forbid,
        max_memory_bytes=None if limit is None else limit * _GIB,
    )


def _nothing_fits(
    args: argparse.Namespace, request: Request, found: SearchResult
) -> int:
    why, changes = nearest_fit(request)
    if args.json:
        nearest = [
            {"change": change.text, "layout": str(change.layout)} for change in changes
        ]
        print(json.dumps({**found.as_json(), "problem": why, "changes": nearest}))
        return 1
    lines = [why, *(f"  {change.text}: {change.layout}" for change in changes)]
    print("\n".join(lines))
    return 1


def _text(found: SearchResult, costs: Sequence[TrainingCost]) -> list[str]:
    best = found.plans[0]
    training = ["", "the whole training, plan by plan:"] if costs else []
    return [
        f"{found.considered_count:,} layouts considered in {found.seconds:.1f} s, "
        f"{found.estimated_count:,} of them estimated; the others fall to bounds",
        *(f"note: {note}" for note in found.notes),
        "",
        *estimate_in_words(best),
        *(f"  {change.text}" for change in sensitivities(best)),
        "",
        "plans, fastest first:",
        *(_row(plan) for plan in found.plans),
        *training,
        *(f"  {cost.text}" for cost in costs),
        "",
        "smallest for their time:",
        *(_row(plan) for plan in found.front),
        "",
        f"{found.rejected_count:,} rejected, such as:",
        *(f"  {other.layout}: {other.reason}" for other in found.rejected[:_SHOWN]),
    ]


def _how_to_run(args: argparse.Namespace, best: Estimate) -> str:
    """The command that trains under a plan, or why none does."""
    run = best.run
    if OTHER_SHAPES.keys() & {args.preset, args.model}:
        return (
            "run it: from Python, meshpar.make_train_step(model, optimizer, "
            f"{str(run.layout)!r}); meshpar train reads text"
        )
    if PUBLISHED & {args.preset, args.model}:
        return "run it: not yet; a published run's shape is no preset; give its sizes"
    if args.vocab is not None and (args.model or "").endswith(".json"):
        return (
            "run it: not yet; a config.json has its own vocabulary; leave --vocab out"
        )
    real = run.cluster.device.platform != "cpu"
    preset, sizes = train_model(args)
    if args.preset is None or sizes:
        try:
            sizes = words_to_train(sizes, preset, run.workload, run.seq)
        except InputError as error:
            return f"run it: not yet; {error}"
    words = ["--layout", str(run.layout)]
    words += option_words({"--preset": preset, "--model": sizes})
    words += ["--global-batch", str(run.global_batch), "--seq", str(run.seq)]
    words += ["--emulate", "0" if real else str(run.cluster.num_devices)]
    return f"run it: {shlex.join(['meshpar', 'train', *words])}"


def _row(plan: Estimate) -> str:
    return (
        f"  {milliseconds(plan.step_s):>8}  at half the network "
        f"{milliseconds(at_half_network_s(plan)):>8}  MFU {plan.mfu:5.1%}  "
        f"{gigabytes(plan.memory.total_bytes):>8}  {plan.run.layout}"
    )
