"""Experts over rows in the order of their experts, tile by tile.

Each expert's rows are cut into tiles of a fixed number of rows. The last tile may
reach into the rows of the next expert, where it writes nothing. So at most one tile an
expert is wasted, for rows / experts / tile useful ones, and an expert without rows
costs nothing. The number of tiles depends on the data: the loop ends after the last one
that is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.parallel.expert.functions import Arrays, Function
from meshpar.trace.walk import expect_iterations

_LEAST_TILE, _MOST_TILE = 8, 1024
_LEAST_TILES = 8
"""An expert has at least this many tiles at balanced load."""

LEAST_TILES_BY_HOST = 4
"""The same in a part of the rows that are sent by host. Its parts are smaller, and each
tile reads the weights of its expert, and in the backward adds to their gradients."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Tiles of a list of rows.

    Args:
        expert: (tiles,) int32, the expert of each tile.
        first: (tiles,) int32, its first row.
        rows: (tiles,) int32, number of its rows that belong to the expert.
        number: int32 scalar, number of tiles in use.
        tile: Rows of a tile.
        filled: Tiles that hold as many rows as there is room for.
    """

    expert: jax.Array
    first: jax.Array
    rows: jax.Array
    number: jax.Array
    tile: int = field(metadata={"static": True})
    filled: float = field(metadata={"static": True})

    def own(self, at: jax.Array) -> jax.Array:
        """Return True for each row of tile `at` that belongs to its expert."""
        return jnp.arange(self.tile) < self.rows[at]


def tile_size(num_rows: int, num_experts: int, least_tiles: int = _LEAST_TILES) -> int:
    """Return the rows of a tile: a power of two, at most an eighth of a fair share.

    Args:
        num_rows: Rows of all experts.
        num_experts: Number of experts.
        least_tiles: Tiles of a fair share, if it is not an eighth.

    Example:
        >>> tile_size(32_768, 4), tile_size(24, 4)
        (1024, 8)
    """
    share = num_rows // (num_experts * least_tiles)
    size = 1 << max(share, 1).bit_length() - 1
    return min(max(size, _LEAST_TILE), _MOST_TILE)


def cut(
    rows_per_expert: jax.Array, starts: jax.Array, num_rows: int, tile: int
) -> Tiles:
    """Cut rows in the order of their experts into tiles.

    Args:
        rows_per_expert: (experts,) int32, whose sum is at most `num_rows`.
        starts: (experts,) int32, where the rows of each begin.
        num_rows: Room for rows.
        tile: Rows of a tile.
    """
    num_experts = rows_per_expert.shape[0]
    most = num_rows // tile + num_experts
    tiles = -(-rows_per_expert // tile)
    ends = jnp.cumsum(tiles)
    at = jnp.arange(most, dtype=jnp.int32)
    # Not `jnp.searchsorted`, which is a loop of small kernels.
    expert = jnp.sum(ends <= at[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    before = (at - (ends - tiles)[expert]) * tile
    return Tiles(
        expert=expert,
        first=(starts[expert] + before).astype(jnp.int32),
        rows=(rows_per_expert[expert] - before).astype(jnp.int32),
        number=ends[-1].astype(jnp.int32),
        tile=tile,
        filled=num_rows / tile,
    )


Reader = Callable[[jax.Array], Any]
"""First place of a tile -> what is at its places."""


def reader(rows: jax.Array, order: jax.Array | None, tile: int) -> Reader:
    """Return a function that reads the rows of a tile.

    Args:
        rows: Array with a row first.
        order: Index of the row at each place; None if rows are in their places.
        tile: Rows of a tile.
    """
    if order is None:
        padded = _padded(rows, tile)
        return lambda first: rows_of(padded, first, tile)
    places = _padded(order, tile)
    return lambda first: rows.at[rows_of(places, first, tile)].get(mode="clip")


def forward(
    read: Reader, experts: Arrays, tiles: Tiles, function: Function, results: tuple
) -> tuple[jax.Array, Arrays]:
    """Write the weighted results of each row by its expert, and residuals.

    Args:
        read: Of a tile's rows and the fp32 factors of their results.
        experts: Arrays whose first dim is the experts.
        tiles: From `cut`.
        function: Function of one expert.
        results: Arrays to write into, from `empty_results`. Rows of other tiles stay.
    """

    def put(at: jax.Array, carry: tuple) -> tuple:
        first = tiles.first[at]
        found = function.forward(_expert(experts, tiles, at), *read(first))
        own = tiles.own(at)
        return jax.tree.map(
            lambda rows, values: _put(rows, values, first, own), carry, found
        )

    return _for_tiles(tiles, put, results)


def empty_results(
    x: jax.Array, experts: Arrays, num_rows: int, tile: int, function: Function
) -> tuple[jax.Array, Arrays]:
    """Return zeros for the results of `num_rows` rows, and for what is kept of them."""
    one = tuple(jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in experts)
    row = jax.ShapeDtypeStruct((1, x.shape[-1]), x.dtype)
    factor = jax.ShapeDtypeStruct((1,), jnp.float32)
    shapes = jax.eval_shape(function.forward, one, row, factor)
    return jax.tree.map(
        lambda own: jnp.zeros((num_rows + tile, *own.shape[1:]), x.dtype), shapes
    )


def backward(
    read: Reader, experts: Arrays, tiles: Tiles, function: Function, gradients: tuple
) -> tuple[jax.Array, jax.Array, Arrays]:
    """Write gradients of rows and factors, and add fp32 ones of the experts' arrays.

    Each tile of a `GatedMLP` is two matmuls for each one of the forward.

    Args:
        read: Of a tile's rows, factors, residuals (a tuple) and gradients of results.
        experts: As for `forward`.
        tiles: As for `forward`.
        function: As for `forward`.
        gradients: Arrays to write into, from `empty_gradients`.
    """

    def add(at: jax.Array, carry: tuple) -> tuple:
        dx, dweight, dexperts = carry
        expert, first, own = tiles.expert[at], tiles.first[at], tiles.own(at)
        x, weight, kept, dy = read(first)
        dx_TD, dweight_T, more = function.backward(
            _expert(experts, tiles, at),
            x,
            weight,
            kept,
            jnp.where(own[:, None], dy, 0),
            own,
        )
        dexperts = jax.tree.map(
            lambda total, added: total.at[expert].add(added), dexperts, more
        )
        return (
            _put(dx, dx_TD, first, own),
            _put(dweight, dweight_T, first, own),
            dexperts,
        )

    return _for_tiles(tiles, add, gradients)


def empty_gradients(
    x: jax.Array, experts: Arrays, num_rows: int, tile: int
) -> tuple[jax.Array, jax.Array, Arrays]:
    """Return zeros for the gradients of `num_rows` rows, factors and the experts."""
    return (
        jnp.zeros((num_rows + tile, x.shape[-1]), x.dtype),
        jnp.zeros((num_rows + tile,), jnp.float32),
        tuple(jnp.zeros(array.shape, jnp.float32) for array in experts),
    )


def _expert(experts: Arrays, tiles: Tiles, at: jax.Array | int) -> Arrays:
    """Return the arrays of a tile's expert."""
    return tuple(array[tiles.expert[at]] for array in experts)


def _for_tiles(
    tiles: Tiles, run: Callable[[jax.Array, Any], Any], carry: tuple
) -> tuple:
    """Run over the tiles in use."""
    most = tiles.expert.shape[0]

    def goes_on(state: tuple) -> jax.Array:
        # The constant bound tells the audit how often the loop runs at most.
        at = expect_iterations(state[0], tiles.filled)
        return (at < most) & (at < tiles.number)

    return lax.while_loop(
        goes_on,
        lambda state: (state[0] + 1, run(state[0], state[1])),
        (jnp.int32(0), carry),
    )[1]


def _padded(rows: jax.Array, tile: int) -> jax.Array:
    return jnp.pad(rows, ((0, tile), *[(0, 0)] * (rows.ndim - 1)))


def rows_of(rows: jax.Array, first: jax.Array, tile: int) -> jax.Array:
    """Return the rows of a tile."""
    return lax.dynamic_slice_in_dim(rows, first, tile)


def _put(
    rows: jax.Array, values: jax.Array, first: jax.Array, own: jax.Array
) -> jax.Array:
    """Write the values of a tile's own rows."""
    before = rows_of(rows, first, len(values))
    own = own.reshape(-1, *(1,) * (values.ndim - 1))
    new = jnp.where(own, values.astype(rows.dtype), before)
    return lax.dynamic_update_slice_in_dim(rows, new, first, axis=0)
