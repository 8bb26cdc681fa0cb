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

from meshpar.chunk_bytes import SCORE_BYTES


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
        return jnp.einsum("BKGTS,BSKH->BTKGH", softmax_BKGTS, v), softmax_BKGTS

    mixed, softmax = _part_by_part(
        attend, _parts(_num_parts(q, k), _grouped(q, k), k, v)
    )
    return _joined(mixed).reshape(q.shape), (q, k, v, softmax)


def _backward(kept: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    def gradients(
        softmax_BKGTS: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        dy: jax.Array,
    ) -> tuple:
        dv = jnp.einsum("BKGTS,BTKGH->BSKH", softmax_BKGTS, dy)
        dsoftmax_BKGTS = _dot("BTKGH,BSKH->BKGTS", dy, v)
        wide = softmax_BKGTS.astype(jnp.float32)
        mean = jnp.sum(dsoftmax_BKGTS * wide, axis=-1, keepdims=True)
        dscores_BKGTS = (wide * (dsoftmax_BKGTS - mean) * _scale(q)).astype(q.dtype)
        dq = jnp.einsum("BKGTS,BSKH->BTKGH", dscores_BKGTS, k)
        return dq, jnp.einsum("BKGTS,BTKGH->BSKH", dscores_BKGTS, q), dv

    q, k, v, softmax = kept
    parts = _parts(len(softmax), _grouped(q, k), k, v, _grouped(dy, v))
    dq, dk, dv = map(_joined, _part_by_part(gradients, (softmax, *parts)))
    return dq.reshape(q.shape), dk, dv


causal_attention.defvjp(_forward, _backward)


def _num_parts(q: jax.Array, k: jax.Array) -> int:
    batch, seq, heads, _ = q.shape
    kv_heads = k.shape[2]
    score_bytes = 4 * batch * (heads // kv_heads) * seq * seq
    most = max(1, SCORE_BYTES // max(1, score_bytes))
    enough = range(-(-kv_heads // most), kv_heads + 1)
    return next(num for num in enough if kv_heads % num == 0)


def _parts(num: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """(batch, seq, kv heads, ...) -> (parts, batch, seq, kv heads of one, ...)."""

    def cut(array: jax.Array) -> jax.Array:
        batch, seq, kv_heads, *rest = array.shape
        parts = array.reshape(batch, seq, num, kv_heads // num, *rest)
        return jnp.moveaxis(parts, 2, 0)

    return tuple(map(cut, arrays))


def _part_by_part(function: Callable[..., tuple], arrays: tuple) -> tuple:
    if arrays[0].shape[0] > 1:
        return lax.map(lambda part: function(*part), arrays)
    found = function(*(array[0] for array in arrays))
    return tuple(array[None] for array in found)


def _joined(parts: jax.Array) -> jax.Array:
    num, batch, seq, kv_heads, *rest = parts.shape
    return jnp.moveaxis(parts, 0, 2).reshape(batch, seq, num * kv_heads, *rest)


def _grouped(heads_BTNH: jax.Array, of: jax.Array) -> jax.Array:
    batch, seq, heads, head_dim = heads_BTNH.shape
    kv_heads = of.shape[2]
    return heads_BTNH.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)


def _scale(q: jax.Array) -> float:
    return 1 / math.sqrt(q.shape[-1])


def _dot(dims: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(dims, one, other, preferred_element_type=jnp.float32)
