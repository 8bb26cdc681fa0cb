"""Plans of models that are no transformers: volumes, and recommendation with tables."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshpar.cli.parsing import MODEL_FROM, given_options, parse_sizes
from meshpar.cli.plan_training import OF_TRAINING
from meshpar.errors import InputError
from meshpar.planner.cost.estimate import gigabytes, milliseconds
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.execution import MESHPAR
from meshpar.planner.plan import Plan, PlanRequest
from meshpar.planner.search.space import Constraints
from meshpar.planner.workload.shapes import TRACED

if TYPE_CHECKING:  # It needs jax.
    from meshpar.model.contract import Model
    from meshpar.tables.table import Table

_OF_TRANSFORMERS = (
    *("measure", "confirm", *OF_TRAINING),
    *("seq", "vocab", "slots", "prompt"),
)
_PLANS = 10
_ROWS = 1_000_000
"""Rows of each table unless the user gives them."""


def add_table_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the option that only models with tables have."""
    parser.add_argument(
        "--tables",
        metavar="ROWS,...",
        help="of a recommendation model: rows of each feature's table, or one number "
        "for all (default: dlrm-v2's published ones, 1000000 each of others)",
    )


def is_other(args: argparse.Namespace) -> bool:
    """Return True if the options name a preset that is no transformer.

    Raises:
        InputError: `--tables` is given with a transformer.
    """
    found = (args.preset or args.model) in TRACED
    if not found and getattr(args, "tables", None):
        raise InputError(
            "--tables is of models with tables; leave it out",
            key="command.tables_of_transformer",
        )
    return found


def other_request(
    args: argparse.Namespace,
    cluster: Cluster,
    constraints: Constraints,
    global_batch: int,
) -> PlanRequest:
    """Return the plans of such a preset.

    Raises:
        InputError: The planner has no arithmetic for its family, or an option is of
            transformers alone.
    """
    name = args.preset or args.model
    presets = importlib.import_module(MODEL_FROM.partition(":")[0])
    sizes = parse_sizes(args.model) if args.preset and args.model else {}
    model = presets.build(name, **sizes)
    if _is_planned(model):
        _check(args, name)
    shared = {"cluster": cluster, "global_batch": global_batch}
    return _request(args, name, model, {**shared, "constraints": constraints})


def run_other(args: argparse.Namespace, request: PlanRequest) -> int:
    """Prints plans; 0 if there are any, 1 if nothing fits."""
    start = time.perf_counter()
    plans = list(request.plans())
    shown = plans[: getattr(args, "plans", None) or _PLANS]
    if args.json:
        found = {
            "plans": [plan.as_json() for plan in shown],
            "seconds": time.perf_counter() - start,
        }
        print(json.dumps(found))
    elif plans:
        print("\n".join(_text(request, shown)))
    else:
        capacity = gigabytes(request.capacity_bytes)
        print(f"{request.heading}\nnothing fits in {capacity}; give more --devices")
    return 0 if plans else 1


def run_estimate(args: argparse.Namespace, request: PlanRequest) -> int:
    """Prints the estimate of one layout; 0 if it fits, 1 if it does not."""
    plan, fits = request.kept_plan()
    text = "\n".join([request.heading, *plan.lines])
    print(json.dumps(plan.as_json()) if args.json else text)
    return 0 if fits else 1


def _is_planned(model: Model) -> bool:
    """Return whether the planner can plan the model: it has volumes or tables."""
    from meshpar.parallel.grids.space import has_space

    looked_up = any(one.has_gradient for one in (model.inputs or {}).values())
    return has_space(model) or looked_up


def _check(args: argparse.Namespace, name: str) -> None:
    of_subcommand = [one for one in _OF_TRANSFORMERS if one in args]
    for option in given_options(args, of_subcommand):
        raise InputError(
            f"{option} is of models of one text, a decoder, which {name} is not; leave "
            "it out",
            key="command.option_of_transformers",
        )
    if getattr(args, "html", None) and args.curve is None:
        raise InputError(
            f"--html of {name} is of a curve; give --curve too",
            key="command.page_without_curve",
        )
    if args.execution != MESHPAR.name:
        raise InputError(
            f"--execution {args.execution} runs transformers, which {name} is not; "
            "leave it out",
            key="command.execution_of_transformers",
        )


def _request(
    args: argparse.Namespace, name: str, model: Model, shared: dict[str, Any]
) -> PlanRequest:
    from meshpar.parallel.grids.space import has_space

    kept = shared["constraints"].kept
    if has_space(model):
        from meshpar.planner.from_model import traced_volume
        from meshpar.planner.search.volume_plans import VolumeRequest, check_kept

        check_kept(shared["constraints"])  # before a trace, which takes longer
        workload = traced_volume(
            model,
            name,
            precision=kept.get("precision", "bf16"),
            remat=kept.get("remat", "none"),
        )
        return VolumeRequest(workload=workload, **shared)
    if any(one.has_gradient for one in (model.inputs or {}).values()):
        from meshpar.tables.plan_request import TableRequest

        tables = _tables(args, name, model)
        return TableRequest(name=name, model=model, tables=tables, **shared)
    raise InputError(
        f"the planner has no arithmetic for {name}: it knows text, images cut into "
        "patches of a Diffusion Transformer, volumes and tables; meshpar audit "
        f"--preset {name} --layout LINE --target gpu:h100:1x8 compiles a layout",
        key="plan.unknown_family",
    )


def _tables(args: argparse.Namespace, name: str, model: Model) -> tuple[Table, ...]:
    """A table for each feature of the input that is looked up."""
    from meshpar.tables.table import Table

    ((into, looked_up),) = [
        (name, one) for name, one in (model.inputs or {}).items() if one.has_gradient
    ]
    _, features, dim = looked_up.sizes
    rows, bags = _rows_and_bags(args, name, features or 0)
    return tuple(
        Table(name=f"id{at}", rows=count, dim=dim or 0, bag=bag, into=into)
        for at, (count, bag) in enumerate(zip(rows, bags, strict=True))
    )


def _rows_and_bags(
    args: argparse.Namespace, name: str, features: int
) -> tuple[Sequence[int], Sequence[int]]:
    text = getattr(args, "tables", None)
    published = importlib.import_module("meshpar.models.criteo_tables")
    if not text and name == "dlrm-v2" and features == len(published.ROWS):
        return published.ROWS, published.BAGS
    rows = [_rows(part) for part in (text or str(_ROWS)).split(",")]
    rows = rows * features if len(rows) == 1 else rows
    if len(rows) != features:
        raise InputError(
            f"--tables gives {len(rows)} numbers of rows, but {name} has {features} "
            "features; give one for each, or one for all",
            key="command.wrong_number_of_tables",
        )
    return rows, [1] * features


def _rows(text: str) -> int:
    """Rows of a table.

    Raises:
        InputError: It is no whole number above 0.
    """
    if not text.strip().isdecimal() or not int(text):
        raise InputError(
            f"--tables: {text!r} must be a whole number of at least 1",
            key="value.not_whole_number",
        )
    return int(text)


def _text(request: PlanRequest, plans: Sequence[Plan]) -> list[str]:
    best = plans[0]
    return [
        request.heading,
        "",
        *best.lines,
        "",
        "plans, fastest first:",
        *(
            f"  {milliseconds(plan.step_s):>8}  MFU {plan.mfu:5.1%}  "
            f"{gigabytes(plan.memory.total_bytes):>8}  {plan.layout_text}"
            for plan in plans
        ),
        "",
        f"run it: from Python, {best.how_to_run}",
    ]
