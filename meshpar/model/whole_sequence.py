"""What a function needs of whole sequences, where devices share out their tokens."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked, summed
from meshpar.errors import InputError
from meshpar.model.token_flow import SEQUENCE_SUM, WHOLE_SEQUENCE
from meshpar.model.token_order import TokenOrder

Function = Callable[[jax.Array], jax.Array]
"""(batch, seq, ...) -> (batch, seq, ...), in the sequence's order."""


def sequence_sum(x: jax.Array, order: TokenOrder, platform: str) -> jax.Array:
    """`x`, of the tokens at hand, added up over the devices that share them."""
    if order.probing:  # what no device has alone
        return _named(jnp.ones_like, SEQUENCE_SUM)(x)
    if order.num_ranks == 1:
        return x
    with asked("sequence_sum"):
        return summed(x, order.mesh_axis, platform)


def over_sequence(function: Function, x: jax.Array, order: TokenOrder) -> jax.Array:
    """`function` of whole sequences, and of its result the tokens at hand.

    Args:
        function: Of whole sequences.
        x: (batch, tokens at hand, ...).
        order: Which tokens those are.

    Raises:
        InputError: `function` gives another number of tokens.
    """
    if order.probing:
        y = _zeros_like_result(function, x, order)
        places = order.probe.reshape(1, -1, *(1,) * (y.ndim - 2))
        return jnp.broadcast_to(places, y.shape).astype(y.dtype)
    if order.num_ranks == 1:
        return function(x)
    with asked("sequence_gather"):
        ranks = lax.all_gather(x, order.mesh_axis)
    return order.own_of(function, order.natural(ranks, 1), x.shape[1])


def _zeros_like_result(
    function: Function, x: jax.Array, order: TokenOrder
) -> jax.Array:
    """Zeros like what a function of whole sequences gives the tokens at hand."""
    seq = order.length(x.shape[1])
    whole = jnp.zeros((x.shape[0], seq, *x.shape[2:]), x.dtype)
    y = _named(function, WHOLE_SEQUENCE)(whole)
    if y.ndim < 2 or y.shape[1] != seq:
        raise InputError(
            f"a function given to scope.over_sequence gives shape {y.shape} of "
            f"sequences of {seq} tokens; it must give (examples, tokens, ...)",
            key="model.over_sequence_changes_tokens",
        )
    return jnp.zeros((y.shape[0], x.shape[1], *y.shape[2:]), y.dtype)


def _named(function: Function, name: str) -> Function:
    """A function whose call a trace names."""

    def named(x: jax.Array) -> jax.Array:
        return function(x)

    named.__name__ = name
    return jax.jit(named)
