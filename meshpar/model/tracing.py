"""Tracing a model on no device: the shapes it takes, and what to say when it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from meshpar.errors import InputError
from meshpar.model.contract import Model, Params, batch_shapes, is_parameter
from meshpar.model.scope import EXAMPLE


def traced_batch(examples: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """`batch_shapes`, and each example's index, as a model's functions are traced."""
    example = jax.ShapeDtypeStruct((examples,), jnp.uint32)
    return {**batch_shapes(examples, seq), EXAMPLE: example}


def one_layer_shapes(model: Model) -> tuple[Params, list[Params]]:
    """Shapes of the parameters of the ends, and of one layer of each group."""
    return model.split(
        jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype),
            model.parameters,
            is_leaf=is_parameter,
        )
    )


@contextlib.contextmanager
def tracing(problem: str, way_out: str = "") -> Iterator[None]:
    """Turns a model's failure on a batch of tokens alone into an error that says so.

    Args:
        problem: What cannot be done.
        way_out: What to do instead.

    Raises:
        InputError: Its functions raised a `KeyError`, `TypeError` or `ValueError`.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        hint = f"; {way_out}" if way_out else ""
        raise InputError(f"{problem}: {error}{hint}") from error
