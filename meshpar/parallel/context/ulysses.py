"""Ulysses: all-to-alls that trade a split sequence for split heads, and back.

Between them each device has whole sequences of some heads, and attention there is that
of one device; or, where several groups share a sequence, the tokens of its group, and
attention there is that of as many devices as there are groups.
Reference: Jacobs et al. 2023 (DeepSpeed Ulysses), section 3; Fang and Zhao 2024 (USP),
on both at once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.attention_tiles import copies_of_heads
from meshpar.collectives import asked
from meshpar.errors import InputError
from meshpar.model.token_order import TokenOrder


def heads_here(
    q: jax.Array, k: jax.Array, v: jax.Array, order: TokenOrder
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Some heads' queries, keys and values of all tokens of a group.

    One all-to-all each: of n devices a device sends (n-1)/n of what it has. Fewer kv
    heads than devices are sent once to every device whose queries they serve.

    Args:
        q: (batch, tokens, heads, head_dim), this device's tokens.
        k: (batch, tokens, kv_heads, head_dim).
        v: As `k`.
        order: Whose mesh axis is crossed, in groups of `order.num_trading`.

    Raises:
        InputError: The heads do not divide over the devices.
    """
    heads, kv_heads, n = q.shape[2], k.shape[2], order.num_trading
    if heads % n:
        raise InputError(
            f"attention={order.text} splits heads over {n} devices, but each has "
            f"{heads} of them; take attention=ring or allgather, or as many devices as "
            "divide the heads",
            key="attention.indivisible_heads",
        )
    times = copies_of_heads(heads, kv_heads, n)
    k, v = (jnp.repeat(x, times, axis=2) if times > 1 else x for x in (k, v))
    with asked("context_heads"):
        q, k, v = (_trade(x, order, split_axis=2, concat_axis=1) for x in (q, k, v))
        return q, k, v


def tokens_here(y: jax.Array, order: TokenOrder) -> jax.Array:
    """All heads of this device's tokens, from some heads of all: one all-to-all."""
    with asked("context_heads"):
        return _trade(y, order, split_axis=1, concat_axis=2)


def _trade(x: jax.Array, order: TokenOrder, **axes: int) -> jax.Array:
    return lax.all_to_all(
        x, order.mesh_axis, **axes, tiled=True, axis_index_groups=order.trading()
    )
