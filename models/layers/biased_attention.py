"""Attention with a bias of the scores by distance (Raffel et al. 2020, section 2.1).

The distance between a query and a key chooses a bucket, and the bucket has a number for
each head: small distances have buckets of their own, larger ones share them, the wider
the farther. All layers have the same table, so that it goes with the stream.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from meshpar import InputError, Scope
from meshpar.layout.layout import ATTENTION_MIXED
from meshpar.model.token_cache import refuse_uncached
from meshpar.models.layers.recomputed import recomputed

_UNSEEN = -1e30
"""Finite, so that a row without any key is no NaN."""


def attend_with_bias(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scope: Scope,
    *,
    table: jax.Array,
    causal: bool,
    distance: int,
    seen: jax.Array | None = None,
) -> jax.Array:
    """Attention of every query to the keys, on the device that has its head.

    Args:
        q: (batch, seq, heads, head_dim).
        k: As `q`.
        v: As `q`.
        scope: Where the function runs.
        table: (batch, buckets, heads), alike for all examples.
        causal: Whether a query sees no key that follows it.
        distance: From where on all are in the last bucket.
        seen: (batch, keys), False for keys that no query sees; all when absent.

    Raises:
        InputError: Devices share the tokens of a sequence, or a model generates whose
            tokens see those that follow.
    """
    if scope.order is not None and not scope.order.probing:
        raise InputError(
            f"relative positions need whole sequences, but {scope.order.num_ranks} "
            f"devices of {scope.order.mesh_axis} share each; set "
            f"{scope.order.mesh_axis}=1",
            key="layout.relative_positions_split",
        )
    if scope.order is not None and scope.order.cached:
        return jnp.broadcast_to(q[..., :1], v.shape)
    if scope.cache is not None:
        refuse_uncached(causal, seen=seen)
        far = np.arange(scope.cache.max_seq)
        buckets = position_bucket(-far, table.shape[1], distance=distance, causal=True)
        scale = 1 / math.sqrt(q.shape[-1])
        return scope.cache.attend(
            q, k, v, scope, window=None, scale=scale, bias=table[0][buckets]
        )
    heads = ("batch", "seq", "heads", "head_dim")
    if seen is None:
        seen = jnp.ones(k.shape[:2], bool)
    buckets = relative_buckets(
        q.shape[1], table.shape[1], distance=distance, causal=causal
    )
    mixed = scope.map_shards(
        recomputed(functools.partial(_attention, causal=causal, buckets=buckets)),
        (heads, heads, heads, ("batch", None, "heads"), ("batch", "seq")),
        heads,
    )(q, k, v, table, seen)
    return scope.save(scope.constrain(mixed, heads), ATTENTION_MIXED)


def relative_buckets(
    seq: int, num_buckets: int, *, distance: int, causal: bool
) -> np.ndarray:
    """The bucket of each query and key, (seq, seq).

    Half of the buckets are for keys that follow, unless none is seen. Of the rest half
    are for one distance each, and the others for distances up to `distance`, each a
    constant factor wider.

    Example:
        >>> relative_buckets(4, 8, distance=16, causal=True)[3].tolist()
        [3, 2, 1, 0]
    """
    ahead = np.arange(seq) - np.arange(seq)[:, None]
    return position_bucket(ahead, num_buckets, distance=distance, causal=causal)


def position_bucket(
    ahead: np.ndarray, num_buckets: int, *, distance: int, causal: bool
) -> np.ndarray:
    """The bucket of keys so many places ahead of their queries, as above."""
    first = np.zeros_like(ahead)
    if not causal:
        num_buckets //= 2
        first = (ahead > 0) * num_buckets
        away = np.abs(ahead)
    else:
        away = np.maximum(-ahead, 0)
    exact = num_buckets // 2
    # In fp32, as theirs: a distance on a bucket's border falls where theirs does.
    ratio = np.log(np.maximum(away, 1).astype(np.float32) / np.float32(exact))
    wide = ratio / np.float32(math.log(distance / exact))
    far = exact + (wide * np.float32(num_buckets - exact)).astype(np.int64)
    far = np.minimum(far, num_buckets - 1)
    return (first + np.where(away < exact, away, far)).astype(np.int32)


def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table_BRN: jax.Array,
    seen_BS: jax.Array,
    *,
    causal: bool,
    buckets: np.ndarray,
) -> jax.Array:
    # B batch, T seq of queries, S of keys, N heads, H head_dim, R buckets.
    bias_BTSN = jnp.take(table_BRN.astype(jnp.float32), buckets, axis=1)
    scores_BNTS = jnp.einsum(
        "BTNH,BSNH->BNTS", q, k, preferred_element_type=jnp.float32
    ) / math.sqrt(q.shape[-1])
    scores_BNTS = scores_BNTS + bias_BTSN.transpose(0, 3, 1, 2)
    seen = seen_BS[:, None, None].astype(bool)
    if causal:
        place = jnp.arange(q.shape[1])
        seen = seen & (place[:, None] >= place)
    softmax = jax.nn.softmax(jnp.where(seen, scores_BNTS, _UNSEEN), axis=-1)
    return jnp.einsum("BNTS,BSNH->BTNH", softmax.astype(v.dtype), v)
