"""Causal attention that keeps one array of scores for its backward: the softmax.

It keeps queries, keys, values and the softmax in their dtype, as Korthikanti et al.
2022 count them (section 4.1): 2 a s^2 b bytes of 16-bit scores, where the derivative of
the plain program keeps 11. Where a fused kernel is at hand, use that: it keeps none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_SCORE_BYTES = 256 * 2**20
"""Most bytes of fp32 scores at a time, while heads are many: the softmax and its
gradient are fp32 arrays of that size beside the one that is kept."""


@jax.custom_vjp
def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of every query to the keys at its position and before.

    Scores and softmax are made in fp32.

    Args:
        q: (batch, seq, heads, head_dim).
        k: (batch, seq, kv_heads, head_dim); each head serves as many queries' in turn.
        v: As `k`.

    Returns:
        (batch, seq, heads, head_dim), the dtype of `v`.
    """
    return _forward(q, k, v)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple]:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
        # B batch, T and S seq, K kv heads, G queries per kv head, H head_dim.
        scores_BKGTS = _dot("BTKGH,BSKH->BKGTS", q, k) * _scale(q)
        seq = q.shape[1]
        seen_TS = jnp.arange(seq)[:, None] >= jnp.arange(seq)
        scores_BKGTS = jnp.where(seen_TS, scores_BKGTS, -jnp.inf)
        softmax_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v.dtype)
        mixed = jnp.einsum("BKGTS,BSKH->BTKGH", softmax_BKGTS, v)
        return mixed, jnp.swapaxes(softmax_BKGTS, 1, 2)

    mixed, softmax_BGKTS = _over_heads(attend, _grouped(q, k), k, v)
    return mixed.reshape(q.shape), (q, k, v, softmax_BGKTS)


def _backward(kept: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    def gradients(
        q: jax.Array, k: jax.Array, v: jax.Array, softmax: jax.Array, dy: jax.Array
    ) -> tuple:
        softmax_BKGTS = jnp.swapaxes(softmax, 1, 2)
        dv = jnp.einsum("BKGTS,BTKGH->BSKH", softmax_BKGTS, dy)
        dsoftmax_BKGTS = _dot("BTKGH,BSKH->BKGTS", dy, v)
        wide = softmax_BKGTS.astype(jnp.float32)
        mean = jnp.sum(dsoftmax_BKGTS * wide, axis=-1, keepdims=True)
        dscores_BKGTS = (wide * (dsoftmax_BKGTS - mean) * _scale(q)).astype(q.dtype)
        dq = jnp.einsum("BKGTS,BSKH->BTKGH", dscores_BKGTS, k)
        return dq, jnp.einsum("BKGTS,BTKGH->BSKH", dscores_BKGTS, q), dv

    q, k, v, softmax = kept
    dq, dk, dv = _over_heads(gradients, _grouped(q, k), k, v, softmax, _grouped(dy, v))
    return dq.reshape(q.shape), dk, dv


causal_attention.defvjp(_forward, _backward)


def _over_heads(function: Callable[..., tuple], *arrays: jax.Array) -> tuple:
    """`function` of arrays with kv heads third, for some of those heads at a time."""
    batch, seq, kv_heads, per_kv_head, _ = arrays[0].shape
    most = _SCORE_BYTES // (4 * batch * per_kv_head * seq * seq)
    at_once = max(
        n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= max(most, 1)
    )
    if at_once == kv_heads:
        return function(*arrays)

    def first(array: jax.Array) -> jax.Array:
        shape = (*array.shape[:2], -1, at_once, *array.shape[3:])
        return jnp.moveaxis(array.reshape(shape), 2, 0)

    def third(array: jax.Array) -> jax.Array:
        array = jnp.moveaxis(array, 0, 2)
        return array.reshape(*array.shape[:2], -1, *array.shape[4:])

    found = lax.map(lambda some: function(*some), tuple(map(first, arrays)))
    return jax.tree.map(third, found)


def _grouped(heads_BTNH: jax.Array, of: jax.Array) -> jax.Array:
    batch, seq, heads, head_dim = heads_BTNH.shape
    kv_heads = of.shape[2]
    return heads_BTNH.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)


def _scale(q: jax.Array) -> float:
    return 1 / math.sqrt(q.shape[-1])


def _dot(dims: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(dims, one, other, preferred_element_type=jnp.float32)
