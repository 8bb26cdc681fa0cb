"""Suggest logical axis names for the parameters of a loss, from its trace."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshpar.cli.parsing import first_line, import_function, positive
from meshpar.errors import InputError

if TYPE_CHECKING:
    from meshpar.model.contract import Model
    from meshpar.model.inputs import Input

EXAMPLE = "meshpar name recipes.examples.nanogpt_nnx:model --seq 16"
STATUSES = "0 done, 2 bad input"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add(
        "function",
        metavar="MODULE:FUNCTION",
        help="function without arguments that returns a model of from_loss, or (init, "
        "loss), or (init, loss, inputs) with meshpar.Input or example arrays by name",
    )
    add(
        "--seq",
        type=positive,
        default=128,
        metavar="N",
        help="tokens of an example, and every size that the inputs leave open "
        "(default: %(default)s)",
    )
    add("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the table; return 0."""
    build = import_function(args.function, "MODULE:FUNCTION")
    import jax

    from meshpar.model.loss.suggest_names import suggest_names

    jax.config.update("jax_platforms", "cpu")  # This process only traces.
    names = suggest_names(_model(build, args.function), seq=args.seq)
    print(json.dumps(names.as_dict()) if args.json else names)
    return 0


def _model(build: Any, name: str) -> Model:
    """Return the model of a function that returns it, or its parts."""
    from meshpar.model.contract import Model
    from meshpar.model.loss.from_loss import from_loss

    try:
        built = build()
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{name!r} cannot be called with nothing: {first_line(error)}; name a "
            "function without arguments",
            key="command.bad_model_function",
        ) from error
    if isinstance(built, Model):
        return built
    parts = len(built) if isinstance(built, tuple) else 0
    if parts not in (2, 3) or (parts == 3 and not isinstance(built[2], Mapping)):
        raise InputError(
            f"{name!r} gives a {type(built).__name__}; return a model of from_loss, "
            "(init, loss), or (init, loss, inputs)",
            key="command.no_model_returned",
        )
    init, loss, *others = built
    return from_loss(init, loss, inputs=_inputs(others[0]) if others else None)


def _inputs(given: Mapping[str, Any]) -> dict[str, Input]:
    """Return inputs as they are, or those of example arrays."""
    import numpy as np

    from meshpar.model.inputs import Input

    kinds = {"i": "int", "u": "int", "b": "bool", "c": "complex"}
    found = {}
    for name, one in given.items():
        if not isinstance(one, Input):
            shape = np.shape(one)
            kind = kinds.get(np.asarray(one).dtype.kind, "float")
            axes = ("batch", *[None] * (len(shape) - 1))
            one = Input(axes, kind, shape=(None, *shape[1:]))
        found[name] = one
    return found
