"""Check the results of a block and of the head: stream, sums, loss and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import InputError

Sums = dict[str, jax.Array]
"""By name: fp32 scalars of auxiliary losses, arrays of any shape for the state."""


def is_pair(result: Any, stream: Any) -> bool:
    """Return True if a result is (stream, sums), not a stream that is itself a pair."""
    if not (isinstance(result, tuple) and len(result) == 2):
        return False
    if not isinstance(result[1], Mapping):
        return False
    return jax.tree.structure(result) != jax.tree.structure(stream)


def check_sums(
    block: str,
    result: Any,
    stream: Any,
    auxiliary: Mapping[str, float],
    keeps_state: bool,
) -> tuple[Any, Sums]:
    """Return a block's result as (stream, sums), with the sums that are declared.

    Args:
        block: Name of the block in errors.
        result: Value that the block returned.
        stream: Stream that it was given.
        auxiliary: The auxiliary losses that are declared.
        keeps_state: Whether it may return other sums too, for its state.

    Raises:
        InputError: It returns other sums than those declared.
    """
    pair = is_pair(result, stream)
    if not pair and not auxiliary:
        return result, {}
    shapes = {k: _shape(v) for k, v in result[1].items()} if pair else {}
    wrong = any(shapes.get(name) != () for name in auxiliary)
    if wrong or not (keeps_state or set(shapes) == set(auxiliary)):
        found = f"x and {shapes}" if pair else "x alone"
        raise InputError(
            f"{block} returns {found}, but the auxiliary losses declared are "
            f"{list(auxiliary)}; it must return (x, sums) with a scalar for each of "
            "those, or x if none; other sums need update_state",
            key="model.wrong_sums",
        )
    stream, sums = result
    return stream, {
        name: jnp.asarray(sums[name], jnp.float32)
        if name in auxiliary
        else jax.tree.map(jnp.asarray, sums[name])
        for name in sorted(sums)
    }


def check_kept(block: str, y: Any, x: Any) -> None:
    """Raise if a block changes the tree, a shape or a dtype of its stream.

    Args:
        block: Name of the block in errors.
        y: Stream after the block.
        x: Stream before the block.

    Raises:
        InputError: They differ.
    """
    found, wanted = (
        jax.tree.map(lambda x: f"{jnp.result_type(x)}{jnp.shape(x)}", stream)
        for stream in (y, x)
    )
    if found != wanted:
        raise InputError(
            f"{block} maps {wanted} to {found}; blocks must keep shape and dtype of "
            "all that their stream holds, so that they can follow one another",
            key="model.stream_changed",
        )


def check_head(found: Any, head: str = "head") -> tuple[jax.Array, jax.Array]:
    """Return the sums of a head's loss and weights in fp32.

    Args:
        found: Value that the head returned.
        head: Name of the head in errors.

    Raises:
        InputError: They are not two scalars of real numbers.
    """
    pair = tuple(found) if isinstance(found, tuple | list) else (found,)
    shapes = [_shape(value) for value in pair]
    if shapes != [(), ()]:
        raise InputError(
            f"{head} returns arrays of shapes {shapes}; it must return two scalars: "
            "the sum of the loss over the examples and the sum of their weights",
            key="model.head_not_scalars",
        )
    for value in pair:
        if jnp.iscomplexobj(value):
            raise InputError(
                f"{head} returns a {jnp.result_type(value)} scalar; a loss and its "
                "weights are real: take .real or jnp.abs of it",
                key="model.complex_loss",
            )
    loss_sum, weight_sum = (jnp.asarray(value, jnp.float32) for value in pair)
    return loss_sum, weight_sum


def _shape(value: Any) -> Any:
    """Return the shape of an array or a number; of anything else the type's name."""
    try:
        jnp.result_type(value)  # NumPy gives a dict the shape ()
        return jnp.shape(value)
    except TypeError:
        return type(value).__name__
