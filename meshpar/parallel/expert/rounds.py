"""One round of rows to their experts and back, forward and backward written out.

`Routes` say which row goes to which device. Of `n` devices that share the experts each
sends `room` rows to every other. A round of the forward is two all-to-alls of n * room
* embed values (rows there, results back) and one of two fp32 numbers a row; one of the
backward is two of n * room * embed values and one of a number a row. A single device
sends nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshpar.collectives import asked
from meshpar.model.scope import SAVED_PREFIX
from meshpar.parallel.expert import tiles as tiles_of_rows
from meshpar.parallel.expert.functions import Arrays, Function
from meshpar.parallel.expert.tiles import Tiles, reader, rows_of, tile_size

SENT_ROWS = SAVED_PREFIX + "experts_in"
"""Name in a trace of the rows that experts multiply."""

RECEIVED = "received"
"""Name of rows from other devices and of what tells their order.

`remat=full` and `dots` keep them too: what was sent is not sent again."""

_PRODUCTS = SAVED_PREFIX + "experts_gate_up"


@dataclass(frozen=True, kw_only=True)
class Round:
    """Static sizes of a round.

    Args:
        mesh_axes: Mesh axes that split the experts; none if nothing is sent.
        num_devices: Devices along these axes.
        num_experts: Experts of one device.
        room: Rows to each device.
        function: Function of one expert.
        parts: Parts of the room that the forward sends one after another.
        backward_parts: The same of the backward, a divisor of `parts`.
    """

    mesh_axes: tuple[str, ...]
    num_devices: int
    num_experts: int
    room: int
    function: Function
    parts: int = 1
    backward_parts: int = 1

    @property
    def num_rows(self) -> int:
        """Return the rows that one device receives."""
        return self.num_devices * self.room

    def tile(self, parts: int) -> int:
        """Return the rows of a tile if the round is taken in so many parts."""
        return tile_size(self.num_rows // parts, self.num_experts)

    def part(self, rows: jax.Array, part: int, parts: int) -> jax.Array:
        """Return one of equal parts of the room of (devices, room, ...)."""
        room = self.room // parts
        return rows[:, part * room : (part + 1) * room]

    def in_part(self, index: jax.Array, part: int, parts: int) -> jax.Array:
        """Convert an index of (devices, room) to one of a part, (devices, room of it).

        An index of another part becomes any number.
        """
        room = self.room // parts
        return index // self.room * room + index % self.room - part * room

    def in_parts(self, index: jax.Array, parts: int) -> jax.Array:
        """Convert an index of (devices, room) to one of all parts after one another.

        An index past the end stays there.
        """
        room = self.room // parts
        device, rank = index // self.room, index % self.room
        moved = (rank // room * self.num_devices + device) * room + rank % room
        return jnp.where(index < self.num_rows, moved, index)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """Residuals of a round.

    Places are those in the order of the experts, and of parts within an expert.

    Args:
        x: Received rows of each part.
        products: What the experts' function keeps of the row at each place, padded.
        weight: fp32 weight of each received row, (devices * room,).
        order: Index in (devices, room) of the row at each place; None if rows came in
            their places.
        counts: (parts, experts) int32, rows of each expert in each part.
    """

    x: tuple[jax.Array, ...]
    products: Arrays
    weight: jax.Array
    order: jax.Array | None
    counts: jax.Array


def run(
    static: Round,
    x_ND: jax.Array,
    weight_NK: jax.Array,
    experts: Arrays,
    routes: Routes,
    expert_NK: jax.Array,
    first: jax.Array | int,
) -> tuple[jax.Array, Kept]:
    """Return fp32 sums of `weight * expert(x)` over the round's choices, and residuals.

    Args:
        static: Sizes.
        x_ND: This device's tokens.
        weight_NK: fp32 weight of each choice.
        experts: Arrays of this device's experts.
        routes: Routes of the tokens.
        expert_NK: The expert of each choice.
        first: Rows that went to each device in the rounds before.
    """
    tokens, choices = expert_NK.shape
    assignment, valid = sent(routes, first, static.room)
    weight, order, counts = _received(
        static, _places(static, weight_NK, expert_NK, assignment, valid)
    )
    read_weight = reader(weight, order, static.tile(static.parts))
    xs: list[jax.Array] = []

    def multiply(part: int, rows: jax.Array, results: tuple) -> tuple:
        # Named before it is used: a policy that keeps it sends nothing again.
        x = _received(static, lax.collapse(rows, 0, 2))
        xs.append(x)
        tiles = _tiles(static, counts, part, static.parts)
        at = None if order is None else static.in_part(order, part, static.parts)
        read_x = reader(x, at, tiles.tile)
        results = tiles_of_rows.forward(
            lambda first: (read_x(first), read_weight(first)),
            experts,
            tiles,
            static.function,
            results,
        )
        return results, results[0]

    rows = _taken(x_ND, assignment // choices, valid)
    empty = tiles_of_rows.empty_results(
        rows, experts, static.num_rows, static.tile(1), static.function
    )
    names = "expert_dispatch", "expert_combine"
    (_, products), back = _by_parts(
        static, rows, order, static.parts, names, multiply, empty
    )
    products = tuple(checkpoint_name(array, _PRODUCTS) for array in products)
    at = static.in_parts(slots(routes, first, static.room), static.parts)
    results = _at_slots(back, at)
    summed = results.reshape(tokens, choices, -1).astype(jnp.float32).sum(axis=1)
    kept = Kept(
        x=tuple(xs), products=products, weight=weight, order=order, counts=counts
    )
    return summed, kept


def run_backward(
    static: Round,
    kept: Kept,
    dy_ND: jax.Array,
    experts: Arrays,
    routes: Routes,
    first: jax.Array | int,
    choices: int,
) -> tuple[jax.Array, jax.Array, Arrays]:
    """Return fp32 gradients of `x`, `weight` and the experts' arrays of `run`."""
    order, parts = kept.order, static.backward_parts
    tile = static.tile(parts)
    x = jnp.concatenate(kept.x)
    x_at = None if order is None else static.in_parts(order, static.parts)
    read_x, read_weight = reader(x, x_at, tile), reader(kept.weight, order, tile)

    def multiply(part: int, rows: jax.Array, gradients: tuple) -> tuple:
        tiles = _tiles(static, kept.counts, part, parts)
        at = None if order is None else static.in_part(order, part, parts)
        read_dy = reader(lax.collapse(rows, 0, 2), at, tile)

        def read(first: jax.Array) -> tuple:
            products = tuple(rows_of(array, first, tile) for array in kept.products)
            return read_x(first), read_weight(first), products, read_dy(first)

        gradients = tiles_of_rows.backward(
            read, experts, tiles, static.function, gradients
        )
        return gradients, gradients[0]

    assignment, valid = sent(routes, first, static.room)
    dy = _taken(dy_ND, assignment // choices, valid)
    empty = tiles_of_rows.empty_gradients(x, experts, static.num_rows, static.tile(1))
    names = "expert_combine_gradient", "expert_dispatch_gradient"
    (_, dweight, dexperts), dx = _by_parts(
        static, dy, order, parts, names, multiply, empty
    )
    at = slots(routes, first, static.room)
    dweight = _in_rows(static, dweight, order)
    if static.num_devices > 1:
        dweight = _exchange(dweight, static.mesh_axes, names[1])
    dweight = _at_slots(dweight.reshape(-1), at)
    dx = _at_slots(dx, static.in_parts(at, parts))
    tokens = dy_ND.shape[0]
    dx = dx.reshape(tokens, choices, -1).astype(jnp.float32).sum(axis=1)
    return dx, dweight.reshape(tokens, choices), dexperts


def _by_parts(
    static: Round,
    rows: jax.Array,
    order: jax.Array | None,
    num_parts: int,
    names: tuple[str, str],
    multiply: Callable[[int, jax.Array, tuple], tuple],
    carry: tuple,
) -> tuple[tuple, jax.Array]:
    """Send rows, multiply them and send the results back, part by part.

    While a part is multiplied, the next one is sent and the results of the one before
    go back: XLA does no such thing by itself, so barriers fix the order.

    Args:
        static: Sizes.
        rows: (devices, room, embed), rows to each device.
        order: As in `Kept`.
        num_parts: Number of parts.
        names: Names in `ASKED` of both ways.
        multiply: (part, its received rows, carry) -> (carry, array of results by
            place).
        carry: What the first part is given.

    Returns:
        The carry after the last part, and the results by part, device and rank.
    """
    if order is None:
        carry, by_place = multiply(0, rows, carry)
        return carry, by_place[: static.num_rows]
    there, back = (
        functools.partial(_exchange, mesh_axes=static.mesh_axes, name=name)
        for name in names
    )
    places = _inverse(order).reshape(static.num_devices, static.room)
    parts = [static.part(rows, part, num_parts) for part in range(num_parts)]
    arrived: list[jax.Array] = [there(parts[0])]
    results: list[jax.Array] = []
    returned: list[jax.Array] = []
    for part in range(num_parts):
        following = parts[part + 1 : part + 2]
        following, arrived = lax.optimization_barrier((following, arrived))
        beside = [*map(there, following)], [*map(back, results)]
        carry, by_place = multiply(part, arrived[0], carry)
        results = [by_place[static.part(places, part, num_parts)]]
        (arrived, before), results = lax.optimization_barrier((beside, results))
        returned += before
    returned += map(back, results)
    return carry, jnp.concatenate([lax.collapse(each, 0, 2) for each in returned])


def _places(
    static: Round,
    weight_NK: jax.Array,
    expert_NK: jax.Array,
    assignment: jax.Array,
    valid: jax.Array,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Return `weight`, `order` and `counts` of `Kept`."""
    weight = jnp.where(valid, weight_NK.reshape(-1)[assignment], 0.0)
    own = expert_NK.reshape(-1)[assignment] % static.num_experts
    own = jnp.where(valid, own, static.num_experts)
    if static.num_devices > 1:
        beside = jnp.stack([own.astype(jnp.float32), weight], axis=-1)
        beside = _exchange(beside, static.mesh_axes, "expert_dispatch")
        own, weight = beside[..., 0].astype(jnp.int32), beside[..., 1]
    part = jnp.arange(static.room, dtype=jnp.int32) // (static.room // static.parts)
    place = own * static.parts + part
    every = jnp.arange(static.num_experts * static.parts, dtype=jnp.int32)
    counts = jnp.sum(place.reshape(-1, 1) == every, axis=0, dtype=jnp.int32)
    counts = counts.reshape(static.num_experts, static.parts).T
    order = None
    if static.num_devices > 1:
        order = jnp.argsort(place.reshape(-1), stable=True)
    return weight.reshape(-1), order, counts


def _tiles(static: Round, counts: jax.Array, part: int, num_parts: int) -> Tiles:
    """Return the tiles of one part, if the round is taken in so many."""
    counts = counts.reshape(num_parts, -1, static.num_experts).sum(axis=1)
    by_place = counts.T.reshape(-1)
    starts = (jnp.cumsum(by_place) - by_place).reshape(static.num_experts, num_parts)
    rows = static.num_rows // num_parts
    tile = static.tile(num_parts)
    return tiles_of_rows.cut(counts[part], starts[:, part], rows, tile)


def _received(static: Round, arrays: Any) -> Any:
    """Name what came from other devices, for policies of recomputation."""
    arrays = checkpoint_name(arrays, SENT_ROWS)
    return checkpoint_name(arrays, RECEIVED) if static.num_devices > 1 else arrays


def _in_rows(static: Round, by_place: jax.Array, order: jax.Array | None) -> jax.Array:
    """Return what is known of each place as (devices, room, ...)."""
    if order is None:
        return by_place[None, : static.num_rows]
    return by_place[_inverse(order).reshape(static.num_devices, static.room)]


def _inverse(order: jax.Array) -> jax.Array:
    return (
        jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
    )


def _exchange(rows: jax.Array, mesh_axes: tuple[str, ...], name: str) -> jax.Array:
    """Send part `i` of dim 0 to device `i`, and receive the parts for this device."""
    with asked(name):
        return lax.all_to_all(rows, mesh_axes, split_axis=0, concat_axis=0, tiled=True)


def _taken(rows: jax.Array, at: jax.Array, valid: jax.Array) -> jax.Array:
    return jnp.where(valid[..., None], rows[at], 0)


def _at_slots(rows: jax.Array, at: jax.Array) -> jax.Array:
    return rows.at[at].get(mode="fill", fill_value=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routes:
    """A device's assignments of tokens to experts, in the order of their experts.

    Args:
        order: (assignments,) int32, the assignment at each place of the order.
        place: (assignments,) int32, the inverse of `order`.
        device: (assignments,) int32, the device of each assignment's expert; the number
            of devices for a dropped assignment.
        ends: (devices + 1,) int32, where the assignments to each device begin and end.
    """

    order: jax.Array
    place: jax.Array
    device: jax.Array
    ends: jax.Array


def make_routes(experts: jax.Array, num_experts: int, num_devices: int) -> Routes:
    """Return the routes of a device's tokens.

    Args:
        experts: (tokens, choices) int32; `num_experts` for a dropped assignment.
        num_experts: Experts of all devices together, equally many on each.
        num_devices: Devices that share them.
    """
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    place = _inverse(order)
    device = flat // (num_experts // num_devices)
    # Not `jnp.searchsorted`, which is a loop of small kernels.
    bounds = jnp.arange(num_devices + 1, dtype=jnp.int32)
    ends = jnp.sum(device[:, None] < bounds, axis=0, dtype=jnp.int32)
    return Routes(order=order, place=place, device=device, ends=ends)


def most_for_one(routes: Routes) -> jax.Array:
    """Return the most assignments that one device gets, int32."""
    return jnp.max(routes.ends[1:] - routes.ends[:-1])


def sent(
    routes: Routes, first: jax.Array | int, room: int
) -> tuple[jax.Array, jax.Array]:
    """Return the assignments of a round, (devices, room), and which are valid.

    Args:
        routes: A device's routes.
        first: Assignments that went to each device before.
        room: Assignments that go to each device.
    """
    at = routes.ends[:-1, None] + first + jnp.arange(room, dtype=jnp.int32)
    valid = at < routes.ends[1:, None]
    return routes.order[jnp.where(valid, at, 0)], valid


def slots(routes: Routes, first: jax.Array | int, room: int) -> jax.Array:
    """Return the index of each assignment in (devices * room); past its end if absent.

    Args:
        routes: A device's routes.
        first: As for `sent`.
        room: As for `sent`.
    """
    num_devices = routes.ends.shape[0] - 1
    device = jnp.minimum(routes.device, num_devices - 1)
    rank = routes.place - routes.ends[device] - first
    here = (rank >= 0) & (rank < room) & (routes.device < num_devices)
    return jnp.where(here, device * room + rank, num_devices * room)
