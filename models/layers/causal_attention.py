"""Causal attention that keeps one array of scores for its backward: the softmax.

It keeps queries, keys, values and the softmax in their dtype, as Korthikanti et al.
2022 count them (section 4.1): 2 a s^2 b bytes of 16-bit scores, where the derivative of
the plain program keeps 11. Where a fused kernel is at hand, use that: it keeps none.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


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
    # B batch, T and S seq, K kv heads, G queries per kv head, H head_dim.
    scores_BKGTS = _dot("BTKGH,BSKH->BKGTS", _grouped(q, k), k) * _scale(q)
    seq = q.shape[1]
    seen_TS = jnp.arange(seq)[:, None] >= jnp.arange(seq)
    scores_BKGTS = jnp.where(seen_TS, scores_BKGTS, -jnp.inf)
    softmax_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v.dtype)
    mixed = jnp.einsum("BKGTS,BSKH->BTKGH", softmax_BKGTS, v)
    return mixed.reshape(q.shape), (q, k, v, softmax_BKGTS)


def _backward(kept: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, softmax_BKGTS = kept
    dy = _grouped(dy, v)
    dv = jnp.einsum("BKGTS,BTKGH->BSKH", softmax_BKGTS, dy)
    dsoftmax_BKGTS = _dot("BTKGH,BSKH->BKGTS", dy, v)
    wide = softmax_BKGTS.astype(jnp.float32)
    mean = jnp.sum(dsoftmax_BKGTS * wide, axis=-1, keepdims=True)
    dscores_BKGTS = (wide * (dsoftmax_BKGTS - mean) * _scale(q)).astype(q.dtype)
    dq = jnp.einsum("BKGTS,BSKH->BTKGH", dscores_BKGTS, k)
    dk = jnp.einsum("BKGTS,BTKGH->BSKH", dscores_BKGTS, _grouped(q, k))
    return dq.reshape(q.shape), dk, dv


causal_attention.defvjp(_forward, _backward)


def _grouped(heads_BTNH: jax.Array, of: jax.Array) -> jax.Array:
    batch, seq, heads, head_dim = heads_BTNH.shape
    kv_heads = of.shape[2]
    return heads_BTNH.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)


def _scale(q: jax.Array) -> float:
    return 1 / math.sqrt(q.shape[-1])


def _dot(dims: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(dims, one, other, preferred_element_type=jnp.float32)
