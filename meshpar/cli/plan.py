"""Searches layouts for a model on a machine; or says how wrong the planner has been."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshpar.cli.measure import Measured, check_measurable, measure
from meshpar.cli.options import (
    add_counts,
    add_workload_arguments,
    chosen_cluster,
    chosen_workload,
    model_words,
    words_to_train,
)
from meshpar.cli.parsing import (
    PAGES,
    PICTURES,
    above_zero,
    check_picture,
    given_options,
    option_words,
    output_file,
    positive,
)
from meshpar.cli.plan_other import (
    add_table_arguments,
    is_other,
    other_request,
    run_other,
)
from meshpar.cli.plan_training import (
    OF_TRAINING,
    add_training_arguments,
    training_of,
)
from meshpar.errors import InputError, local_path
from meshpar.hardware.platforms import platform_named
from meshpar.layout import MESH_AXES
from meshpar.planner.cost.estimate import (
    Estimate,
    at_half_network_s,
    estimate_in_words,
    gigabytes,
    milliseconds,
)
from meshpar.planner.curve import BATCHES, bend_in_words, curve_in_words, scaling_curve
from meshpar.planner.machine.execution import execution_of
from meshpar.planner.plan import PlanRequest
from meshpar.planner.published import validate
from meshpar.planner.search.remedies import nearest_fit, sensitivities
from meshpar.planner.search.search import Request, SearchResult, search
from meshpar.planner.search.space import Constraints
from meshpar.planner.search.training_cost import TrainingCost, training_cost
from meshpar.planner.workload.shapes import OTHER_SHAPES, PUBLISHED

if TYPE_CHECKING:  # It needs jax.
    from meshpar.cli.confirm import Confirmed

_GIB = 1 << 30
_PLANS = 10
_SHOWN = 12
"""Rejected layouts in the text; --json has more."""

_NOT_WITH_CURVE = ("measure", "confirm", "plans", *OF_TRAINING)

EXAMPLE = "meshpar plan --model llama3-8b --devices 64 --seq 8192 --global-batch 256"
STATUSES = (
    "0 something fits, 1 nothing does (--validate: an error is too large), 2 bad input"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
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
    _add_curve_arguments(parser)
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
    """Print plans; return 1 if nothing fits or a validated error is too large."""
    if args.html:
        check_picture("--html", args.html, PAGES)
    if args.validate:
        rows = validate.rows()
        print(json.dumps(validate.as_json(rows)) if args.json else validate.text(rows))
        return 0 if all(summary.met for summary in validate.summaries(rows)) else 1
    _check_curve(args)
    request = _any_request(args)
    if args.curve is not None:
        return _run_curve(args, request)
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
    """Return what `--json` prints."""
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
    """Return the request to plan: a transformer, or another model."""
    if args.global_batch is None:
        raise InputError(
            "a plan depends on the batch; give --global-batch N, in sequences of --seq",
            key="plan.no_batch",
        )
    if is_other(args):
        cluster, constraints = chosen_cluster(args), _constraints(args)
        return other_request(args, cluster, constraints, args.global_batch)
    workload = chosen_workload(args)
    return Request(
        workload=workload,
        cluster=chosen_cluster(args),
        global_batch=args.global_batch,
        seq=args.seq or workload.seq,
        execution=execution_of(args.execution),
        constraints=_constraints(args),
    )


def _constraints(args: argparse.Namespace) -> Constraints:
    """Return the constraints of the options and of `--layout`."""
    every, limit = args.sync_every, args.max_memory_gib
    by_options = [args.layout, None if every is None else f"sync_every={every}"]
    return Constraints.parse(
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
    """Return the command that trains under a plan, or why none does."""
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
    real = not platform_named(run.cluster.device.platform).is_host
    preset, sizes = model_words(args)
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


def _add_curve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a scaling curve."""
    add = parser.add_argument
    add(
        "--curve",
        nargs="?",
        choices=BATCHES,
        const=BATCHES[0],
        help="instead: the efficiency of the fastest plan on the devices, on half of "
        "them, and so on, where it bends and why; strong keeps the batch, weak as many "
        "examples a device (default: no curve; strong where no word follows)",
    )
    add(
        "--plot",
        type=output_file,
        metavar="FILE",
        help="with --curve: draw it into a .png or .svg (needs meshpar[plots])",
    )


def _check_curve(args: argparse.Namespace) -> None:
    """Raise InputError for an option of plans with `--curve`, or `--plot` alone."""
    if args.curve is None:
        if args.plot is not None:
            raise InputError(
                "--plot draws a curve; give --curve too, or --html",
                key="command.plot_without_curve",
            )
        return
    for option in given_options(args, _NOT_WITH_CURVE):
        raise InputError(
            f"{option} is of plans, which --curve does not list; leave one out",
            key="command.option_with_curve",
        )
    if args.plot is not None:
        check_picture("--plot", args.plot, PICTURES)


def _run_curve(args: argparse.Namespace, request: Request | PlanRequest) -> int:
    """Print the curve; return 0 if anything fits, 1 if nothing does."""
    name = request.workload.name if isinstance(request, Request) else request.name
    curve = scaling_curve(request, args.curve)
    text = "\n".join(curve_in_words(curve))
    printed = json.dumps({"curve": curve.as_json()}) if args.json else text
    if not args.json or not curve.fitting:
        print(printed)
    if not curve.fitting:
        none = f"meshpar plan: {bend_in_words(curve)}; give more --devices"
        print(none, file=sys.stderr)
        return 1
    if args.html:
        from meshpar.cli.report.curve_plot import curve_page

        page = curve_page(name, curve)
        local_path("--html", args.html).write_text(page, encoding="utf-8")
    if args.plot:
        from meshpar.cli.report.curve_plot import write_curve_picture

        write_curve_picture(name, curve, args.plot)
    if args.json:  # last: an error is the one object
        print(printed)
    return 0
