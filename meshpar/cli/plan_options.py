"""Options of `meshpar plan`: the search, a whole training, a curve, the output.

Also the requests of models that are no transformers: volumes, and models with tables.
"""

from __future__ import annotations

import argparse
import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

from meshpar.cli.options import add_counts, add_values, is_traced_preset
from meshpar.cli.parsing import (
    MODEL_FROM,
    PICTURES,
    above_zero,
    check_picture,
    given_options,
    output_file,
    parse_sizes,
    positive,
)
from meshpar.errors import InputError
from meshpar.layout import MESH_AXES
from meshpar.planner.curve import BATCHES
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.execution import MESHPAR
from meshpar.planner.machine.mixed import check_one_kind
from meshpar.planner.search.space import Constraints
from meshpar.planner.search.training_cost import RESTART_S, Training

if TYPE_CHECKING:
    from meshpar.model.contract import Model
    from meshpar.planner.volumes import VolumeRequest
    from meshpar.tables.plan import TableRequest


PLANS = 10
"""Plans of an answer, unless `--plans` says how many."""

_GIB, _HOUR_S = 1 << 30, 3600.0
_NEED_FAILURES = ("checkpoint_s", "restart_s")
_NEED_TOKENS = ("price", "mtbf", *_NEED_FAILURES)
TRAINING_OPTIONS = ("tokens", *_NEED_TOKENS)
"""Names of the options about the whole training."""

_NOT_WITH_CURVE = ("measure", "confirm", "plans", *TRAINING_OPTIONS)


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the limits of the search: what is kept, forbidden, and most memory."""
    add = parser.add_argument
    add(
        "--keep",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="values that every layout must have, such as tensor=8 or remat=full; may "
        "be repeated",
    )
    add("--layout", metavar="LINE", help="layout whose values are kept, as by --keep")
    add(
        "--forbid",
        action="append",
        default=[],
        metavar="AXIS",
        help=f"mesh axis to leave at size 1: {', '.join(MESH_AXES)}; may be repeated",
    )
    every = (
        "steps after which replicas over 'data' average their parameters, for slow "
        "links between sites (the same as --keep sync_every=H)"
    )
    add_values(parser, positive, {"--sync-every H": every})
    limit = "most memory of a device to use (default: all that a program can have)"
    add_values(parser, above_zero, {"--max-memory-gib G": limit})
    add(
        "--axes",
        choices=("built", "planned"),
        default="built",
        help="mesh axes to use; both values mean all of them",
    )


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how many plans are printed, compiled and run, and where a page goes."""
    add = parser.add_argument
    plans = f"plans to find, which --all, --json and --html show (default: {PLANS})"
    add_counts(parser, {"--plans": plans})
    add(
        "--all",
        action="store_true",
        help="print all plans, what each part of the best takes, the smallest, and why "
        "others were rejected (default: the answer in ten lines)",
    )
    numbers = {
        "--confirm K": "number of plans to compile for the machine, which may be "
        "absent; prints predicted and compiled bytes",
        "--measure K": "number of plans to run some steps of, on this machine's "
        "devices, or on virtual ones if --hardware is a CPU's file; prints predicted "
        "and measured times, and the efficiency that fits (default: none)",
    }
    add_values(parser, positive, numbers)
    page = "file of a report with plots (needs meshpar[plots])"
    add_values(parser, output_file, {"--html FILE": page})
    add(
        "--validate",
        action="store_true",
        help="print the planner's error against published runs, instead of plans",
    )


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options about the whole training."""
    options = {
        "--tokens N": "tokens of the whole training, such as 15e12: prints the time "
        "and device hours of every plan (default: no training is estimated)",
        "--price P": "price of a device hour: prints the cost of the training "
        "(default: none)",
        "--mtbf HOURS": "mean time between failures of the whole machine: prints the "
        "best time between checkpoints, and counts the cost of failures (default: no "
        "failures)",
        "--checkpoint-s S": "time that a checkpoint stops the training, in seconds "
        "(default: the time to copy a device's state to its host)",
        "--restart-s S": "time from a failure to the next step (default: "
        f"{RESTART_S:g})",
    }
    add_values(parser, above_zero, options)


def add_curve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a scaling curve."""
    add = parser.add_argument
    add(
        "--curve",
        nargs="?",
        choices=BATCHES,
        const=BATCHES[0],
        help="curve to print instead of plans: the efficiency of the fastest plan on "
        "the devices, on half of them, and so on; strong keeps the batch, weak as many "
        "examples a device (default: no curve; strong if no word follows)",
    )
    plot = ".png or .svg file of the curve (needs meshpar[plots])"
    add_values(parser, output_file, {"--plot FILE": plot})


def add_table_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option that only models with tables have."""
    parser.add_argument(
        "--tables",
        metavar="ROWS,...",
        help="rows of each feature's table of a recommendation model, or one number "
        "for all (default: those published for dlrm-v2, 1000000 each for others)",
    )


def check_curve(args: argparse.Namespace) -> None:
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
            f"{option} applies to plans, which --curve does not list; leave one out",
            key="command.option_with_curve",
        )
    if args.plot is not None:
        check_picture("--plot", args.plot, PICTURES)


def chosen_constraints(args: argparse.Namespace) -> Constraints:
    """Return the constraints of the options and of `--layout`."""
    every, limit = args.sync_every, args.max_memory_gib
    by_options = [args.layout, None if every is None else f"sync_every={every}"]
    return Constraints.parse(
        keep=[*args.keep, *filter(None, by_options)],
        forbid=args.forbid,
        max_memory_bytes=None if limit is None else limit * _GIB,
    )


def chosen_training(args: argparse.Namespace) -> Training | None:
    """Return the training of the options; None without `--tokens`.

    Raises:
        InputError: What depends on `--tokens` or `--mtbf` is given without it.
    """
    if args.tokens is None:
        for option in given_options(args, _NEED_TOKENS):
            raise InputError(
                f"{option} applies to a whole training; give --tokens N",
                key="command.option_without_tokens",
            )
        return None
    if args.mtbf is None:
        for option in given_options(args, _NEED_FAILURES):
            raise InputError(
                f"{option} needs failures; give --mtbf",
                key="command.option_without_failures",
            )
    return Training(
        tokens=args.tokens,
        price=args.price,
        mtbf_s=None if args.mtbf is None else args.mtbf * _HOUR_S,
        checkpoint_s=args.checkpoint_s,
        restart_s=args.restart_s or RESTART_S,
    )


_TRANSFORMER_OPTIONS = (
    *("measure", "confirm", *TRAINING_OPTIONS),
    *("seq", "vocab", "slots", "prompt"),
)
_ROWS = "1000000"
"""Rows of each table unless the user gives them."""


def is_other(args: argparse.Namespace) -> bool:
    """Return True if the options name a preset of volumes, or with tables.

    Raises:
        InputError: `--tables` is given with another model.
    """
    found = is_traced_preset(args) and _has_own_plans(args.preset or args.model)
    if not found and getattr(args, "tables", None):
        raise InputError(
            "--tables applies to models with tables; leave it out",
            key="command.tables_of_transformer",
        )
    return found


@cache
def _has_own_plans(preset: str) -> bool:
    from meshpar.parallel.grids.space import has_space
    from meshpar.tables.plan import looked_up_input

    presets = importlib.import_module(MODEL_FROM.partition(":")[0])
    model = presets.build(preset)
    return has_space(model) or looked_up_input(model) is not None


def other_request(
    args: argparse.Namespace,
    cluster: Cluster,
    constraints: Constraints,
    global_batch: int,
) -> VolumeRequest | TableRequest:
    """Return the request for plans of such a preset.

    Raises:
        InputError: An option is of transformers alone.
    """
    from meshpar.parallel.grids.space import has_space
    from meshpar.tables.plan import TableRequest, feature_tables, looked_up_input

    name = args.preset or args.model
    check_one_kind(cluster, f"{name} is planned on")
    presets = importlib.import_module(MODEL_FROM.partition(":")[0])
    sizes = parse_sizes(args.model) if args.preset and args.model else {}
    model = presets.build(name, **sizes)
    shared: dict[str, Any] = {"cluster": cluster, "global_batch": global_batch}
    if has_space(model):
        _check(args, name)
        return _volume_request(model, name, constraints, shared)
    looked_up = looked_up_input(model)
    assert looked_up is not None  # By `is_other`.
    _check(args, name)
    rows, bags = _rows_and_bags(args, name, looked_up[1].sizes[1])
    tables = feature_tables(name, *looked_up, rows, bags)
    return TableRequest(
        name=name, model=model, tables=tables, constraints=constraints, **shared
    )


def _check(args: argparse.Namespace, name: str) -> None:
    of_subcommand = [one for one in _TRANSFORMER_OPTIONS if one in args]
    for option in given_options(args, of_subcommand):
        raise InputError(
            f"{option} applies to decoder-only language models, which {name} is not; "
            "leave it out",
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


def _volume_request(
    model: Model, name: str, constraints: Constraints, shared: dict[str, Any]
) -> VolumeRequest:
    from meshpar.planner.volume_traces import traced_volume
    from meshpar.planner.volumes import VolumeRequest, check_kept

    check_kept(constraints)  # before a trace, which takes longer
    workload = traced_volume(
        model,
        name,
        precision=constraints.kept.get("precision", "bf16"),
        remat=constraints.kept.get("remat", "none"),
    )
    return VolumeRequest(workload=workload, constraints=constraints, **shared)


def _rows_and_bags(
    args: argparse.Namespace, name: str, features: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the rows of each feature's table, or of all, and the ids of a bag."""
    text = getattr(args, "tables", None)
    published = importlib.import_module("meshpar.models.criteo_tables")
    if not text and name == "dlrm-v2" and features == len(published.ROWS):
        return published.ROWS, published.BAGS
    parts = (text or _ROWS).split(",")
    for part in parts:
        if not part.strip().isdecimal() or not int(part):
            raise InputError(
                f"--tables: {part!r} must be a whole number of at least 1",
                key="value.not_whole_number",
            )
    return tuple(map(int, parts)), ()
