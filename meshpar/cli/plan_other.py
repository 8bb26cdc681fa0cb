"""Requests of models that are no transformers: volumes, and models with tables."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Any

from meshpar.cli.parsing import MODEL_FROM, given_options, parse_sizes
from meshpar.cli.plan_options import TRAINING_OPTIONS
from meshpar.errors import InputError
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.execution import MESHPAR
from meshpar.planner.search.space import Constraints
from meshpar.planner.workload.shapes import TRACED

if TYPE_CHECKING:  # They need jax.
    from meshpar.model.contract import Model
    from meshpar.planner.search.volume_plans import VolumeRequest
    from meshpar.tables.plan_request import TableRequest

_TRANSFORMER_OPTIONS = (
    *("measure", "confirm", *TRAINING_OPTIONS),
    *("seq", "vocab", "slots", "prompt"),
)
_ROWS = "1000000"
"""Rows of each table unless the user gives them."""


def is_other(args: argparse.Namespace) -> bool:
    """Return True if the options name a preset that is no transformer.

    Raises:
        InputError: `--tables` is given with a transformer.
    """
    found = (args.preset or args.model) in TRACED
    if not found and getattr(args, "tables", None):
        raise InputError(
            "--tables applies to models with tables; leave it out",
            key="command.tables_of_transformer",
        )
    return found


def other_request(
    args: argparse.Namespace,
    cluster: Cluster,
    constraints: Constraints,
    global_batch: int,
) -> VolumeRequest | TableRequest:
    """Return the request for plans of such a preset.

    Raises:
        InputError: The planner has no arithmetic for its family, or an option is of
            transformers alone.
    """
    from meshpar.parallel.grids.space import has_space
    from meshpar.tables.plan_request import (
        TableRequest,
        feature_tables,
        looked_up_input,
    )

    name = args.preset or args.model
    presets = importlib.import_module(MODEL_FROM.partition(":")[0])
    sizes = parse_sizes(args.model) if args.preset and args.model else {}
    model = presets.build(name, **sizes)
    shared: dict[str, Any] = {"cluster": cluster, "global_batch": global_batch}
    if has_space(model):
        _check(args, name)
        return _volume_request(model, name, constraints, shared)
    looked_up = looked_up_input(model)
    if looked_up is not None:
        _check(args, name)
        rows, bags = _rows_and_bags(args, name, looked_up[1].sizes[1])
        tables = feature_tables(name, *looked_up, rows, bags)
        return TableRequest(
            name=name, model=model, tables=tables, constraints=constraints, **shared
        )
    raise InputError(
        f"the planner has no arithmetic for {name}: it knows text, images cut into "
        "patches of a Diffusion Transformer, volumes and tables; meshpar audit "
        f"--preset {name} --layout LINE --target gpu:h100:1x8 compiles a layout",
        key="plan.unknown_family",
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
    from meshpar.planner.search.volume_plans import VolumeRequest, check_kept
    from meshpar.planner.volume_traces import traced_volume

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
