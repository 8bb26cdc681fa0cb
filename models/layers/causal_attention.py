"""Attention that keeps one array of scores for its backward: the softmax.

It keeps queries, keys, values and the softmax in their dtype, as Korthikanti et al.
2022 count them (section 4.1): 2 a s^2 b bytes of 16-bit scores, where the derivative of
the plain program keeps 11. Where a fused kernel is at hand, use that: it keeps none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from meshpar.parallel.sizes import score_parts
from meshpar.parallel.tensor import AnyArray

# Finite, so that a row without any key is no NaN.
_UNSEEN = -1e30

# Dims: B batch, T seq of queries, S seq of keys, N heads, P parts, K kv heads of one,
# G heads for each of them, M = G x T, H head_dim.


def causal_attention(
    q: Float[AnyArray, "batch seq heads head_dim"],
    k: Float[AnyArray, "batch seq kv_heads head_dim"],
    v: Float[AnyArray, "batch seq kv_heads head_dim"],
) -> Float[AnyArray, "batch seq heads head_dim"]:
    """Attention of every query to the keys at its position and before.

    Scores and softmax are made in fp32.

    Args:
        q: (batch, seq, heads, head_dim).
        k: (batch, seq, kv_heads, head_dim); each head serves as many queries' in turn.
        v: As `k`.

    Returns:
        (batch, seq, heads, head_dim), the dtype of `v`.
    """
    return _attention(True, q, k, v, None)


def full_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array | None = None
) -> jax.Array:
    """Attention of every query to all keys, of which there may be another number.

    Args:
        q: (batch, seq, heads, head_dim).
        k: (batch, keys, kv_heads, head_dim).
        v: As `k`.
        seen: (batch, keys), False for keys that no query sees.

    Returns:
        (batch, seq, heads, head_dim), the dtype of `v`; zeros in examples without a key
        to see.
    """
    return _attention(False, q, k, v, seen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    causal: bool, q: jax.Array, k: jax.Array, v: jax.Array, seen_BS: jax.Array | None
) -> jax.Array:
    return _forward(causal, q, k, v, seen_BS)[0]


def _forward(
    causal: bool, q: jax.Array, k: jax.Array, v: jax.Array, seen_BS: jax.Array | None
) -> tuple[jax.Array, tuple]:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
        scores_BKGTS = _dot("BKGTH,BKSH->BKGTS", q, k) * _scale(q)
        if causal:
            seq = k.shape[-2]
            seen_TS = jnp.arange(seq)[:, None] >= jnp.arange(seq)
            # Without the barrier XLA makes a mask of all scores before the loop.
            seen_TS, scores_BKGTS = lax.optimization_barrier((seen_TS, scores_BKGTS))
            scores_BKGTS = scores_BKGTS + jnp.where(seen_TS, 0.0, -jnp.inf)
        if seen_BS is not None:
            seen = seen_BS[:, None, None, None].astype(bool)
            scores_BKGTS = jnp.where(seen, scores_BKGTS, _UNSEEN)
        softmax_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v.dtype)
        if seen_BS is not None:
            some = seen.any(axis=-1, keepdims=True)
            softmax_BKGTS = jnp.where(some, softmax_BKGTS, 0)
        return jnp.einsum("BKGTS,BKSH->BKGTH", softmax_BKGTS, v), softmax_BKGTS

    num = _num_parts(q, k)
    queries, keys_values = _cut(num, q, k.shape[2]), _keys_values(num, k, v)
    mixed, softmax = _part_by_part(attend, (queries, *keys_values))
    return _joined(mixed), (q, k, v, softmax)


def _backward(causal: bool, kept: tuple, dy: jax.Array) -> tuple:
    def gradients(
        softmax_BKGTS: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        dy: jax.Array,
    ) -> tuple:
        dv = _sum_over_queries(softmax_BKGTS, dy)
        dsoftmax_BKGTS = _dot("BKGTH,BKSH->BKGTS", dy, v)
        wide = softmax_BKGTS.astype(jnp.float32)
        mean = jnp.sum(dsoftmax_BKGTS * wide, axis=-1, keepdims=True)
        dscores_BKGTS = (wide * (dsoftmax_BKGTS - mean) * _scale(q)).astype(q.dtype)
        dq = jnp.einsum("BKGTS,BKSH->BKGTH", dscores_BKGTS, k)
        return dq, _sum_over_queries(dscores_BKGTS, q), dv

    q, k, v, softmax = kept
    # Where the forward was run again for this, XLA would read its fp32 scores here, and
    # so keep them, since that saves a conversion.
    softmax = lax.optimization_barrier(softmax)
    num, kv_heads = len(softmax), k.shape[2]
    queries = _cut(num, q, kv_heads)
    arrays = softmax, queries, *_keys_values(num, k, v), _cut(num, dy, kv_heads)
    dq, dk, dv = _part_by_part(gradients, arrays)
    return _joined(dq), _joined(dk[:, :, :, None]), _joined(dv[:, :, :, None]), None


_attention.defvjp(_forward, _backward)


def _num_parts(q: jax.Array, k: jax.Array) -> int:
    batch, seq, heads, _ = q.shape
    keys, kv_heads = k.shape[1:3]
    return score_parts(4 * batch * (heads // kv_heads) * seq * keys, kv_heads)


def _cut(num: int, heads_BTNH: jax.Array, kv_heads: int) -> jax.Array:
    """-> PBKGTH, `num` parts.

    In this order the matmuls read the scores as they lie; another would have a compiler
    copy all that are kept.
    """
    batch, seq, heads, head_dim = heads_BTNH.shape
    each = heads // kv_heads
    parts = heads_BTNH.reshape(batch, seq, num, kv_heads // num, each, head_dim)
    return jnp.transpose(parts, (2, 0, 3, 4, 1, 5))


def _keys_values(num: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """-> PBKSH of each."""
    return tuple(_cut(num, array, array.shape[2]).squeeze(3) for array in arrays)


def _joined(parts_PBKGTH: jax.Array) -> jax.Array:
    """-> BTNH."""
    num, batch, kv_heads, each, seq, head_dim = parts_PBKGTH.shape
    heads = jnp.transpose(parts_PBKGTH, (1, 4, 0, 2, 3, 5))
    return heads.reshape(batch, seq, num * kv_heads * each, head_dim)


def _sum_over_queries(scores_BKGTS: jax.Array, values_BKGTH: jax.Array) -> jax.Array:
    """-> BKSH, one matmul for each kv head; `values` are queries, or gradients."""
    batch, kv_heads, each, seq, keys = scores_BKGTS.shape
    scores = scores_BKGTS.reshape(batch, kv_heads, each * seq, keys)
    values = values_BKGTH.reshape(batch, kv_heads, each * seq, -1)
    return jnp.einsum("BKMS,BKMH->BKSH", scores, values)


def _part_by_part(function: Callable[..., tuple], arrays: tuple) -> tuple:
    if arrays[0].shape[0] > 1:
        return lax.map(lambda part: function(*part), arrays)
    found = function(*(array[0] for array in arrays))
    return tuple(array[None] for array in found)


def _scale(q: jax.Array) -> float:
    return 1 / math.sqrt(q.shape[-1])


def _dot(dims: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(dims, one, other, preferred_element_type=jnp.float32)
