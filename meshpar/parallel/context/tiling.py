"""A device's arrays as tiles, and back: what attention over shards is planned on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.parallel.context.hops import Hops

# Dims: B batch, T tokens of a device, N heads, K kv heads, G heads for each, H
# head_dim, P tiles, S tokens of a tile, R devices along the mesh axis.


class Known(NamedTuple):
    """What a mask is made of beside positions.

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
    """How attention over the shards of a sequence is made.

    Args:
        hops: Whose keys the queries meet, and in which tiles.
        method: `ring` or `allgather`; of no effect where a device has all tokens.
        num_parts: Parts that the kv heads are gathered in, one after another.
    """

    hops: Hops
    method: str = "ring"
    num_parts: int = 1


def segment_tiles(segments_BT: jax.Array | None, tile: int) -> jax.Array | None:
    """-> PBS, padding in none."""
    if segments_BT is None:
        return None
    batch, tokens = segments_BT.shape
    padded = jnp.pad(segments_BT, ((0, 0), (0, -tokens % tile)), constant_values=-1)
    return jnp.moveaxis(padded.reshape(batch, -1, tile), 1, 0)


def tiled(plan: Plan, x_BTNH: jax.Array, kv_heads: int, which: int = 0) -> jax.Array:
    """-> PBKGSH, zeros where a tile has no token."""
    batch, tokens, heads, head_dim = x_BTNH.shape
    tile = plan.hops.tiles[which]
    padded = jnp.pad(x_BTNH, ((0, 0), (0, -tokens % tile), (0, 0), (0, 0)))
    parts = padded.reshape(batch, -1, tile, kv_heads, heads // kv_heads, head_dim)
    return jnp.transpose(parts, (1, 0, 3, 4, 2, 5))


def tiled_keys(plan: Plan, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """-> PBKSH of each."""
    return tuple(tiled(plan, x, x.shape[2], 1).squeeze(3) for x in arrays)


def in_parts(plan: Plan, arrays: tuple) -> tuple:
    """Tiles of all heads -> (parts, ...) of tiles of some, each."""

    def cut(x: jax.Array) -> jax.Array:
        shape = x.shape[:2], (plan.num_parts, -1), x.shape[3:]
        return jnp.moveaxis(x.reshape(*shape[0], *shape[1], *shape[2]), 2, 0)

    return tuple(map(cut, arrays))


def by_part(function: Callable[[tuple], Any], arrays: tuple) -> Any:
    """`function` of each part of some arrays, one after another: (parts, ...) each."""
    if len(arrays[0]) > 1:
        return lax.map(function, arrays)
    found = function(tuple(x[0] for x in arrays))
    return jax.tree.map(lambda x: x[None], found)


def joined(parts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """(parts, P, B, K of one, G, S, H) -> BTNH of a shape, padding cut off."""
    batch, tokens, heads, head_dim = shape
    whole = jnp.transpose(parts, (2, 1, 5, 0, 3, 4, 6))
    return whole.reshape(batch, -1, heads, head_dim)[:, :tokens]
