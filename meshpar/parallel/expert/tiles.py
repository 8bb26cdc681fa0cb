"""Experts over rows in the order of their experts, tile by tile.

Each expert's rows are cut into tiles of a fixed number of rows. The last tile may
reach into the rows of the next expert; what it writes there is overwritten by that
expert's own tiles, which follow. So at most one tile an expert is wasted, for rows /
experts / tile useful ones, and an expert without rows costs nothing. The number of
tiles depends on the data: the loop ends after the last one that is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.parallel.expert.functions import Arrays, Function
from meshpar.trace.walk import expect_iterations

_LEAST_TILE, _MOST_TILE = 8, 1024
_WASTE = 8
"""An expert has at least this many tiles at balanced load."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Tiles of a list of rows.

    Args:
        expert: (tiles,) int32, the expert of each tile.
        first: (tiles,) int32, its first row.
        rows: (tiles,) int32, number of its rows that belong to the expert.
        number: int32 scalar, number of tiles in use.
    """

    expert: jax.Array
    first: jax.Array
    rows: jax.Array
    number: jax.Array


def tile_size(num_rows: int, num_experts: int) -> int:
    """Return the rows of a tile: a power of two, at most an eighth of a fair share.

    Example:
        >>> tile_size(32_768, 4), tile_size(24, 4)
        (1024, 8)
    """
    share = num_rows // (num_experts * _WASTE)
    size = 1 << max(share, 1).bit_length() - 1
    return min(max(size, _LEAST_TILE), _MOST_TILE)


def cut(rows_per_expert: jax.Array, num_rows: int, tile: int) -> Tiles:
    """Cut rows in the order of their experts into tiles.

    Args:
        rows_per_expert: (experts,) int32, whose sum is at most `num_rows`.
        num_rows: Room for rows.
        tile: Rows of a tile.
    """
    num_experts = rows_per_expert.shape[0]
    most = num_rows // tile + num_experts
    tiles = -(-rows_per_expert // tile)
    ends = jnp.cumsum(tiles)
    at = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.sum(ends <= at[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    before = (at - (ends - tiles)[expert]) * tile
    first = (jnp.cumsum(rows_per_expert) - rows_per_expert)[expert] + before
    return Tiles(
        expert=expert,
        first=first.astype(jnp.int32),
        rows=(rows_per_expert[expert] - before).astype(jnp.int32),
        number=ends[-1].astype(jnp.int32),
    )


def forward(
    x_RD: jax.Array,
    weight_R: jax.Array,
    experts: Arrays,
    tiles: Tiles,
    tile: int,
    function: Function,
) -> tuple[jax.Array, Arrays]:
    """Return the weighted results of each row by its expert, and residuals.

    Args:
        x_RD: Rows in the order of their experts.
        weight_R: fp32 factor of each row's result.
        experts: Arrays whose first dim is the experts.
        tiles: From `cut`.
        tile: Rows of a tile.
        function: Function of one expert.

    Returns:
        The results, and what `function` keeps of each row for `backward`. Rows of no
        expert are undefined.
    """
    num_rows = x_RD.shape[0]
    x, weight = _padded(x_RD, tile), _padded(weight_R, tile)

    def run(at: jax.Array | int) -> tuple[jax.Array, Arrays]:
        first = tiles.first[at]
        rows = _rows(x, first, tile), _rows(weight, first, tile)
        return function.forward(_expert(experts, tiles, at), *rows)

    def put(at: jax.Array, carry: tuple) -> tuple:
        first = tiles.first[at]
        return jax.tree.map(lambda rows, own: _put(rows, own, first), carry, run(at))

    zeros = jax.tree.map(
        lambda own: jnp.zeros((num_rows + tile, *own.shape[1:]), x_RD.dtype),
        jax.eval_shape(run, 0),
    )
    filled = _for_tiles(tiles, num_rows / tile, put, zeros)
    return jax.tree.map(lambda array: array[:num_rows], filled)


def backward(
    x_RD: jax.Array,
    weight_R: jax.Array,
    experts: Arrays,
    tiles: Tiles,
    tile: int,
    function: Function,
    kept: Arrays,
    dy_RD: jax.Array,
) -> tuple[jax.Array, jax.Array, Arrays]:
    """Return gradients of `x`, `weight`, and in fp32 of the experts' arrays.

    Gradients of the experts are added up in place. Each tile of a `GatedMLP` is two
    matmuls for each one of the forward.
    """
    num_rows, embed = x_RD.shape
    x, weight, dy = (_padded(array, tile) for array in (x_RD, weight_R, dy_RD))
    kept = tuple(_padded(array, tile) for array in kept)

    def add(at: jax.Array, carry: tuple) -> tuple:
        dx, dweight, dexperts = carry
        expert, first = tiles.expert[at], tiles.first[at]
        own = jnp.arange(tile) < tiles.rows[at]
        dx_TD, dweight_T, more = function.backward(
            _expert(experts, tiles, at),
            _rows(x, first, tile),
            _rows(weight, first, tile),
            tuple(_rows(array, first, tile) for array in kept),
            jnp.where(own[:, None], _rows(dy, first, tile), 0),
            own,
        )
        dexperts = jax.tree.map(
            lambda total, added: total.at[expert].add(added), dexperts, more
        )
        return _put(dx, dx_TD, first), _put(dweight, dweight_T, first), dexperts

    zeros = (
        jnp.zeros((num_rows + tile, embed), x.dtype),
        jnp.zeros((num_rows + tile,), weight.dtype),
        tuple(jnp.zeros(array.shape, jnp.float32) for array in experts),
    )
    dx, dweight, dexperts = _for_tiles(tiles, num_rows / tile, add, zeros)
    return dx[:num_rows], dweight[:num_rows], dexperts


def _expert(experts: Arrays, tiles: Tiles, at: jax.Array | int) -> Arrays:
    """Return the arrays of a tile's expert."""
    return tuple(array[tiles.expert[at]] for array in experts)


def _for_tiles(
    tiles: Tiles, filled: float, run: Callable[[jax.Array, Any], Any], carry: tuple
) -> tuple:
    """Run over the tiles in use; `filled` of them hold as many rows as there are."""
    most = tiles.expert.shape[0]

    def goes_on(state: tuple) -> jax.Array:
        # The constant bound tells the audit how often the loop runs at most.
        at = expect_iterations(state[0], filled)
        return (at < most) & (at < tiles.number)

    return lax.while_loop(
        goes_on,
        lambda state: (state[0] + 1, run(state[0], state[1])),
        (jnp.int32(0), carry),
    )[1]


def _padded(rows: jax.Array, tile: int) -> jax.Array:
    return jnp.pad(rows, ((0, tile), *[(0, 0)] * (rows.ndim - 1)))


def _rows(rows: jax.Array, first: jax.Array, tile: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(rows, first, tile)


def _put(rows: jax.Array, values: jax.Array, first: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(
        rows, values.astype(rows.dtype), first, axis=0
    )
