"""Gated MLPs of many experts over rows in the order of their experts, tile by tile.

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

from meshpar.hardware.platforms import platform_named

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
    expert = jnp.searchsorted(ends, at, side="right").astype(jnp.int32)
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
    gate_up_EDPF: jax.Array,
    down_EFD: jax.Array,
    tiles: Tiles,
    tile: int,
) -> tuple[jax.Array, jax.Array]:
    """Return `weight * down(silu(gate(x)) * up(x))` of each row by its expert.

    Args:
        x_RD: Rows in the order of their experts.
        weight_R: fp32 factor of each row's result.
        gate_up_EDPF: (experts, embed, 2, mlp).
        down_EFD: (experts, mlp, embed).
        tiles: From `cut`.
        tile: Rows of a tile.

    Returns:
        The results, and the products with `gate_up`, (rows, 2, mlp), for `backward`.
        Rows of no expert are undefined.
    """
    num_rows, embed = x_RD.shape
    x, weight = _padded(x_RD, tile), _padded(weight_R, tile)
    hidden = gate_up_EDPF.shape[2:]

    def one(at: jax.Array, carry: tuple) -> tuple:
        y, kept = carry
        expert, first = tiles.expert[at], tiles.first[at]
        both = jnp.einsum("TD,DPF->TPF", _rows(x, first, tile), gate_up_EDPF[expert])
        acted = _swiglu(both, _rows(weight, first, tile))
        out = jnp.einsum("TF,FD->TD", acted, down_EFD[expert])
        return _put(y, out, first), _put(kept, both, first)

    room = num_rows + tile
    y = jnp.zeros((room, embed), x.dtype)
    kept = jnp.zeros((room, *hidden), x.dtype)
    y, kept = _for_tiles(tiles, one, (y, kept))
    return y[:num_rows], kept[:num_rows]


def backward(
    x_RD: jax.Array,
    weight_R: jax.Array,
    gate_up_EDPF: jax.Array,
    down_EFD: jax.Array,
    tiles: Tiles,
    tile: int,
    kept_RPF: jax.Array,
    dy_RD: jax.Array,
    platform: str,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return gradients of `x`, `weight`, and in fp32 of `gate_up` and `down`.

    Gradients of the experts are added up in place. Each tile is two matmuls for each
    one of the forward.
    """

    def wide(dims: str, left: jax.Array, right: jax.Array) -> jax.Array:
        # XLA:CPU has no fp32 product of narrower operands in a loop.
        if not platform_named(platform).sums_16_bits:
            left, right = left.astype(jnp.float32), right.astype(jnp.float32)
        return jnp.einsum(dims, left, right, preferred_element_type=jnp.float32)

    num_rows, embed = x_RD.shape
    x, weight, both, dy = (
        _padded(array, tile) for array in (x_RD, weight_R, kept_RPF, dy_RD)
    )

    def one(at: jax.Array, carry: tuple) -> tuple:
        dx, dweight, dgate_up, ddown = carry
        expert, first = tiles.expert[at], tiles.first[at]
        own = jnp.arange(tile) < tiles.rows[at]
        dy_TD = jnp.where(own[:, None], _rows(dy, first, tile), 0)
        acted, pull = jax.vjp(
            _swiglu, _rows(both, first, tile), _rows(weight, first, tile)
        )
        dacted = jnp.einsum("TD,FD->TF", dy_TD, down_EFD[expert])
        ddown = ddown.at[expert].add(wide("TF,TD->FD", acted, dy_TD))
        dboth, dweight_T = pull(dacted)
        more = wide("TD,TPF->DPF", _rows(x, first, tile), dboth)
        dgate_up = dgate_up.at[expert].add(more)
        dx_TD = jnp.einsum("TPF,DPF->TD", dboth, gate_up_EDPF[expert])
        return _put(dx, dx_TD, first), _put(dweight, dweight_T, first), dgate_up, ddown

    zeros = (
        jnp.zeros((num_rows + tile, embed), x.dtype),
        jnp.zeros((num_rows + tile,), weight.dtype),
        jnp.zeros(gate_up_EDPF.shape, jnp.float32),
        jnp.zeros(down_EFD.shape, jnp.float32),
    )
    dx, dweight, dgate_up, ddown = _for_tiles(tiles, one, zeros)
    return dx[:num_rows], dweight[:num_rows], dgate_up, ddown


def _swiglu(both_TPF: jax.Array, weight_T: jax.Array) -> jax.Array:
    both = both_TPF.astype(jnp.float32)
    acted = jax.nn.silu(both[:, 0]) * both[:, 1] * weight_T[:, None]
    return acted.astype(both_TPF.dtype)


def _for_tiles(
    tiles: Tiles, one: Callable[[jax.Array, Any], Any], carry: tuple
) -> tuple:
    most = tiles.expert.shape[0]

    def goes_on(state: tuple) -> jax.Array:
        # The constant bound tells the audit how often the loop runs at most.
        return (state[0] < most) & (state[0] < tiles.number)

    return lax.while_loop(
        goes_on,
        lambda state: (state[0] + 1, one(state[0], state[1])),
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
