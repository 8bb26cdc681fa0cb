"""Search layouts for a model on a machine, or print the planner's known errors."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshpar.cli.measure import Measured, check_measurable, measure
from meshpar.cli.options import (
    add_workload_arguments,
    chosen_cluster,
    chosen_workload,
    is_traced_preset,
    model_words,
    planned_model,
    words_to_train,
)
from meshpar.cli.parsing import PAGES, check_picture, option_words
from meshpar.cli.plan_options import (
    PLANS,
    add_curve_arguments,
    add_output_arguments,
    add_search_arguments,
    add_table_arguments,
    add_training_arguments,
    check_curve,
    chosen_constraints,
    chosen_training,
    is_other,
    other_request,
)
from meshpar.errors import InputError, local_path
from meshpar.hardware.platforms import platform_named
from meshpar.planner.cost.run import Run
from meshpar.planner.curve import bend_in_words, curve_in_words, scaling_curve
from meshpar.planner.machine.execution import execution_of
from meshpar.planner.machine.mixed import crossing_first
from meshpar.planner.plan import Plan, gigabytes, milliseconds
from meshpar.planner.published import validate
from meshpar.planner.search.result import (
    PlanRequest,
    SearchResult,
    assumptions,
    guess_note,
)
from meshpar.planner.search.space import Constraints
from meshpar.planner.search.training_cost import Training, TrainingCost, training_cost
from meshpar.planner.workload.shapes import OTHER_SHAPES, PUBLISHED

if TYPE_CHECKING:  # It needs jax.
    from meshpar.cli.confirm import Confirmed

_SHOWN = 12
"""Rejected layouts in the text; --json has more."""

EXAMPLE = "meshpar plan --model llama3-8b --devices 64 --seq 8192 --global-batch 256"
STATUSES = (
    "0 something fits, 1 nothing does (--validate: an error is too large), 2 bad input"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add_workload_arguments(parser)
    add_search_arguments(parser)
    add_output_arguments(parser)
    add_training_arguments(parser)
    add_curve_arguments(parser)
    add_table_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print plans; return 1 if nothing fits or a validated error is too large."""
    if args.html:
        check_picture("--html", args.html, PAGES)
    if args.validate:
        rows = validate.rows()
        print(json.dumps(validate.as_json(rows)) if args.json else validate.text(rows))
        return 0 if all(summary.met for summary in validate.summaries(rows)) else 1
    check_curve(args)
    request = _chosen_request(args)
    if args.curve is not None:
        return _run_curve(args, request)
    training = chosen_training(args)
    if args.measure is not None:
        check_measurable(request.cluster)
    everything = args.all or args.json or args.html
    found = request.search(num_plans=args.plans or PLANS, plans_only=not everything)
    if not found.plans:
        return _nothing_fits(args, request, found)
    _print_plans(args, found, training)
    return 0


def _print_plans(
    args: argparse.Namespace, found: SearchResult, training: Training | None
) -> None:
    """Run and compile what the options say, and print and write what was found."""
    costs = [training_cost(plan, training) for plan in found.plans if training]
    measured, confirmed = None, []
    if args.measure is not None:
        measured = measure(args, found.plans[: args.measure])
    if args.confirm is not None:
        from meshpar.cli.confirm import confirm  # jax, which nothing else here needs

        confirmed = confirm(args, found.plans[: args.confirm])
    if not args.json:
        text = _everything(found, costs) if args.all else _answer(found, costs)
        lines = [*text, _how_to_run(args, found.plans[0])]
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


def _chosen_request(args: argparse.Namespace) -> PlanRequest:
    """Return the request to plan: a transformer, or another model."""
    if args.global_batch is None:
        raise InputError(
            "a plan depends on the batch; give --global-batch N, in sequences of --seq",
            key="plan.no_batch",
        )
    if is_other(args):
        cluster, constraints = chosen_cluster(args), chosen_constraints(args)
        return other_request(args, cluster, constraints, args.global_batch)
    # It needs numpy, as the other modules imported in functions here do.
    from meshpar.planner.search.search import Request

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
    """Return the constraints, without `context` if a traced model refuses it."""
    constraints = chosen_constraints(args)
    traced = args.model_from is not None or is_traced_preset(args)
    if not traced or "context" in constraints.kept:
        return constraints
    from meshpar.checks.sequences import check_token_wise

    try:
        check_token_wise(planned_model(args))
    except InputError:
        forbidden = constraints.forbidden | {"context"}
        return replace(constraints, forbidden=forbidden)
    return constraints


def _report(
    found: SearchResult,
    costs: Sequence[TrainingCost],
    confirmed: Sequence[Confirmed],
    measured: Measured | None,
) -> dict[str, Any]:
    """Return what `--json` prints."""
    from meshpar.planner.search.remedies import sensitivities, unsearched

    report: dict[str, Any] = found.as_json()
    best = found.plans[0]
    report["sensitivity"] = [change.as_json() for change in sensitivities(best)]
    report["unsearched"] = unsearched(best)
    report["assumptions"] = [one.as_json() for one in assumptions(found.plans)]
    for plan, cost in zip(report["plans"], costs, strict=False):
        plan["training"] = cost.as_json()
    if confirmed:
        report["confirmed"] = [one.as_json() for one in confirmed]
    if measured is not None:
        report.update(measured.as_json())
    return report


def _nothing_fits(
    args: argparse.Namespace, request: PlanRequest, found: SearchResult
) -> int:
    """Print the nearest changes that make something fit; return 1."""
    from meshpar.planner.search.remedies import nearest_fit
    from meshpar.planner.search.search import Request

    if isinstance(request, Request):
        why, changes = nearest_fit(request)
    else:
        capacity = gigabytes(found.capacity_bytes)
        why, changes = f"nothing fits in {capacity}; give more --devices", ()
    if args.json:
        nearest = [
            {"change": change.text, "layout": str(change.layout)} for change in changes
        ]
        print(json.dumps({**found.as_json(), "problem": why, "changes": nearest}))
    else:
        lines = [why, *(f"  {change.text}: {change.layout}" for change in changes)]
        print("\n".join(lines))
    return 1


def _answer(found: SearchResult, costs: Sequence[TrainingCost]) -> list[str]:
    """Return the best plan in ten lines at most, the command that runs it included."""
    best = found.plans[0]
    deciding = [one.text for one in assumptions(found.plans) if one.decides]
    guess = guess_note(best.run.cluster.device)
    assumed = deciding[:1] or ([guess] if guess else [])
    return [
        *best.answer,
        *assumed,
        *(f"the whole training: {cost.text}" for cost in costs[:1]),
        f"{found.considered_count:,} layouts considered in {found.seconds:.1f} s; "
        "--all prints the other plans, each part of this one, and why others fail",
    ]


def _everything(found: SearchResult, costs: Sequence[TrainingCost]) -> list[str]:
    """Return the best plan part by part, the other plans, and the rejected."""
    from meshpar.planner.search.remedies import sensitivities, unsearched

    best = found.plans[0]
    training = ["", "the whole training, plan by plan:"] if costs else []
    return [
        f"{found.considered_count:,} layouts considered in {found.seconds:.1f} s, "
        f"{found.estimated_count:,} of them estimated; the others fall to bounds",
        *(f"note: {note}" for note in found.notes),
        "",
        *best.lines,
        *(f"  {change.text}" for change in sensitivities(best)),
        *(f"  {line}" for line in unsearched(best)),
        *(f"  {one.text}" for one in assumptions(found.plans)),
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
        "",
    ]


def _row(plan: Plan) -> str:
    return (
        f"  {milliseconds(plan.step_s):>8}  at half the network "
        f"{milliseconds(plan.half_network_step_s):>8}  MFU {plan.mfu:5.1%}  "
        f"{gigabytes(plan.memory.total_bytes):>8}  {plan.run.layout_text}"
    )


def _how_to_run(args: argparse.Namespace, best: Plan) -> str:
    """Return the command that trains under a plan, or why none does."""
    run = best.run
    if run.layout.scales_matmuls:
        return (
            f"run it: not yet; {run.execution.name} trains in {run.layout.precision}, "
            "meshpar does not"
        )
    if isinstance(run, Run) and run.workload.mtp_layers:
        return f"run it: not yet; {run.execution.name} trains mtp_layers, meshpar not"
    if args.model_from is not None:
        return f"run it: {run.python_call}"
    if is_traced_preset(args) or OTHER_SHAPES.keys() & {args.preset, args.model}:
        return f"run it: from Python, {run.python_call}; meshpar train reads text"
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
    orders = best.mesh_orders
    if orders is not None and orders.lines:
        words += ["--mesh-order", ",".join(orders.as_json()["fastest"])]
    command = shlex.join(["meshpar", "train", *words])
    return _on_mixed(command, run) if run.cluster.parts else f"run it: {command}"


def _on_mixed(command: str, run: Run) -> str:
    """Return the command with the order of the mesh, and what is known of it."""
    _, shape = crossing_first(run.cluster, run.layout.mesh_shape)
    order = ",".join(axis for axis, size in shape.items() if size > 1)
    return (
        "run it, which no one has on several kinds of GPU (planner guide, Mixed "
        f"hardware): {command} --mesh-order {order}"
    )


def _run_curve(args: argparse.Namespace, request: PlanRequest) -> int:
    """Print the curve; return 0 if anything fits, 1 if nothing does."""
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
        from meshpar.cli.report.plan_page import curve_page

        page = curve_page(request.name, curve)
        local_path("--html", args.html).write_text(page, encoding="utf-8")
    if args.plot:
        from meshpar.cli.report.plan_page import write_curve_picture

        write_curve_picture(request.name, curve, args.plot)
    if args.json:  # last: an error is the one object
        print(printed)
    return 0
