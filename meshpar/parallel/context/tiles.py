"""Attention tile by tile: an online softmax that keeps no scores.

    s = q k^T / sqrt(head_dim)     p = exp(s - lse)     lse = log(sum over keys exp(s))
    y = p v                        ds = p (dy v^T - sum(dy y) + dlse)

A loop over tiles of queries and keys carries each query's maximum, sum and output, so
that memory is linear in the sequence. Tiles without a pair that sees are not in the
loop. Reference: Milakov and Gimelshein 2018; Dao et al. 2022 (flash attention).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.layout.layout import ATTENTION_MIXED
from meshpar.model.scope import named_residual
from meshpar.parallel.context.mask import Hops, Marks, Mask, seen

_Tree = TypeVar("_Tree")

UNSEEN = -1e30
"""The log-sum-exp of no key: finite, so that nothing becomes NaN."""

# Dims: P tiles, B batch, K kv heads, G queries for each, T queries of a tile, S keys of
# a tile, H head_dim.


class Running(NamedTuple):
    """The softmax so far.

    Args:
        output: fp32 PBKGTH, not yet divided.
        highest: fp32 PBKGT, the greatest score.
        total: fp32 PBKGT, the sum of exp(score - highest).
    """

    output: jax.Array
    highest: jax.Array
    total: jax.Array

    @classmethod
    def start(cls, q_PBKGTH: jax.Array) -> Running:
        """Return the softmax before any key."""
        rows = q_PBKGTH.shape[:-1]
        return cls(
            jnp.zeros(q_PBKGTH.shape, jnp.float32),
            jnp.full(rows, UNSEEN, jnp.float32),
            jnp.zeros(rows, jnp.float32),
        )

    def result(self) -> tuple[jax.Array, jax.Array]:
        """Return output PBKGTH and log-sum-exp PBKGT, fp32; zeros if no key is seen."""
        some = self.total > 0
        total = jnp.where(some, self.total, 1.0)
        lse = jnp.where(some, self.highest + jnp.log(total), UNSEEN)
        return self.output / total[..., None], lse


class Queries(NamedTuple):
    """Queries in tiles, PBKGTH, their marks, and what the backward needs."""

    q: jax.Array
    marks: Marks
    backward: Backward | None = None


class Backward(NamedTuple):
    """Results of the forward for queries in tiles, and their gradient.

    Args:
        dy: PBKGTH, the gradient of the output.
        lse: fp32 PBKGT, the log-sum-exp of all scores.
        delta: fp32 PBKGT, `sum(dy y) - dlse`.
    """

    dy: jax.Array
    lse: jax.Array
    delta: jax.Array


class Keys(NamedTuple):
    """Keys and values in tiles, PBKSH each."""

    k: jax.Array
    v: jax.Array
    marks: Marks


def attend(
    mask: Mask,
    running: Running,
    queries: Queries,
    keys: Keys,
    pairs: jax.Array,
    prefix: jax.Array | None,
) -> Running:
    """Return the softmax with more keys.

    Args:
        mask: The mask.
        running: The softmax so far.
        queries: In tiles.
        keys: In tiles.
        pairs: (n, 3): tile of queries, tile of keys, 1 where the pair counts.
        prefix: As `mask.seen` takes it.
    """

    def body(running: Running, pair: jax.Array) -> tuple[Running, None]:
        one, other, here = _at(queries, pair[0]), _at(keys, pair[1]), pair[2] > 0
        before = _at(running, pair[0])
        scores, visible = _scores(mask, one, other, prefix, here)
        highest = jnp.maximum(before.highest, jnp.max(scores, axis=-1))
        p = jnp.where(visible, jnp.exp(scores - highest[..., None]), 0.0)
        kept = jnp.exp(before.highest - highest)
        mixed = _dot("BKGTS,BKSH->BKGTH", p.astype(other.v.dtype), other.v)
        after = Running(
            before.output * kept[..., None] + mixed,
            highest,
            before.total * kept + jnp.sum(p, axis=-1),
        )
        return jax.tree.map(
            lambda x, new: lax.dynamic_update_index_in_dim(x, new, pair[0], 0),
            running,
            after,
        ), None

    return lax.scan(body, running, pairs)[0]


def gradients(
    mask: Mask,
    of_queries: jax.Array,
    of_keys: tuple[jax.Array, jax.Array],
    queries: Queries,
    keys: Keys,
    pairs: jax.Array,
    prefix: jax.Array | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Add the fp32 gradients of more pairs to those of queries, keys and values.

    Args:
        mask: The mask.
        of_queries: PBKGTH so far.
        of_keys: PBKSH of keys and of values so far.
        queries: In tiles, with `backward`.
        keys: In tiles.
        pairs: As for `attend`.
        prefix: As for `attend`.
    """

    def body(found: tuple, pair: jax.Array) -> tuple[tuple, None]:
        dq, dk, dv = found
        one, other, here = _at(queries, pair[0]), _at(keys, pair[1]), pair[2] > 0
        dy, lse, delta = cast(Backward, one.backward)
        scores, visible = _scores(mask, one, other, prefix, here)
        p = jnp.where(visible, jnp.exp(scores - lse[..., None]), 0.0)
        dp = _dot("BKGTH,BKSH->BKGTS", dy, other.v)
        ds = p * (dp - delta[..., None]) * _scale(one.q)
        ds = ds.astype(one.q.dtype)
        more_dv = _dot("BKGTS,BKGTH->BKSH", p.astype(dy.dtype), dy)
        more_dk = _dot("BKGTS,BKGTH->BKSH", ds, one.q)
        more_dq = _dot("BKGTS,BKSH->BKGTH", ds, other.k)
        return (
            _add(dq, more_dq, pair[0]),
            _add(dk, more_dk, pair[1]),
            _add(dv, more_dv, pair[1]),
        ), None

    (dq, dk, dv), _ = lax.scan(body, (of_queries, *of_keys), pairs)
    return dq, (dk, dv)


def _scores(
    mask: Mask,
    queries: Queries,
    keys: Keys,
    prefix: jax.Array | None,
    here: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return BKGTS of one tile, `UNSEEN` where masked, and True where it is seen."""
    visible = seen(mask, queries.marks, keys.marks, prefix) & here
    visible_B11TS = visible[:, None, None]
    scores = _dot("BKGTH,BKSH->BKGTS", queries.q, keys.k) * _scale(queries.q)
    return jnp.where(visible_B11TS, scores, UNSEEN), visible_B11TS


def _scale(q: jax.Array) -> float:
    return 1 / math.sqrt(q.shape[-1])


def _dot(dims: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(dims, one, other, preferred_element_type=jnp.float32)


def _at(tree: _Tree, place: jax.Array) -> _Tree:
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, place, 0, keepdims=False), tree
    )


def _add(array: jax.Array, more: jax.Array, place: jax.Array) -> jax.Array:
    before = lax.dynamic_index_in_dim(array, place, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(array, before + more, place, 0)


# Dims: B batch, T tokens of a device, N heads, K kv heads, G heads for each, H
# head_dim, P tiles, S tokens of a tile, R devices along the mesh axis.


class Known(NamedTuple):
    """The arrays of a mask besides positions.

    Args:
        rank: This device's place along the mesh axis.
        q_segments: (batch, queries) int32, or None.
        k_segments: (batch, keys) int32, or None.
        prefix: (batch,) int32, or None.
    """

    rank: jax.Array
    q_segments: jax.Array | None = None
    k_segments: jax.Array | None = None
    prefix: jax.Array | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How attention over the shards of a sequence runs.

    Args:
        hops: Whose keys the queries meet, and in which tiles.
        gathers: True if keys are gathered; else they go round.
        num_parts: Parts of the kv heads that are moved one after another.
    """

    hops: Hops
    gathers: bool = False
    num_parts: int = 1


def segment_tiles(segments_BT: jax.Array | None, tile: int) -> jax.Array | None:
    """Cut into tiles: PBS; padding is in no document."""
    if segments_BT is None:
        return None
    batch, tokens = segments_BT.shape
    padded = jnp.pad(segments_BT, ((0, 0), (0, -tokens % tile)), constant_values=-1)
    return jnp.moveaxis(padded.reshape(batch, -1, tile), 1, 0)


def tiled(plan: Plan, x_BTNH: jax.Array, kv_heads: int, which: int = 0) -> jax.Array:
    """Cut into tiles: PBKGSH, zeros where a tile has no token."""
    batch, tokens, heads, head_dim = x_BTNH.shape
    tile = plan.hops.tiles[which]
    padded = jnp.pad(x_BTNH, ((0, 0), (0, -tokens % tile), (0, 0), (0, 0)))
    parts = padded.reshape(batch, -1, tile, kv_heads, heads // kv_heads, head_dim)
    return jnp.transpose(parts, (1, 0, 3, 4, 2, 5))


def tiled_keys(plan: Plan, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Cut each into tiles: PBKSH."""
    return tuple(tiled(plan, x, x.shape[2], 1).squeeze(3) for x in arrays)


def in_parts(plan: Plan, arrays: tuple) -> tuple:
    """Cut tiles of all heads into (parts, ...) of tiles of some heads, each."""

    def cut(x: jax.Array) -> jax.Array:
        shape = x.shape[:2], (plan.num_parts, -1), x.shape[3:]
        return jnp.moveaxis(x.reshape(*shape[0], *shape[1], *shape[2]), 2, 0)

    return tuple(map(cut, arrays))


def by_part(function: Callable[[tuple], Any], arrays: tuple) -> Any:
    """Run `function` on each part of the arrays in turn: (parts, ...) each."""
    if len(arrays[0]) > 1:
        return lax.map(function, arrays)
    found = function(tuple(x[0] for x in arrays))
    return jax.tree.map(lambda x: x[None], found)


def joined(parts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Join (parts, P, B, K of one, G, S, H) to BTNH of a shape, without padding."""
    batch, tokens, heads, head_dim = shape
    whole = jnp.transpose(parts, (2, 1, 5, 0, 3, 4, 6))
    return whole.reshape(batch, -1, heads, head_dim)[:, :tokens]


def named_results(output: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return attention's output and log-sum-exp under the name that `remat` knows.

    A policy that keeps both spares the backward the whole forward.
    """
    output, lse = (named_residual(x, ATTENTION_MIXED) for x in (output, lse))
    return output, lse
