"""One round of rows to their experts and back, forward and backward written out.

`Routes` say which row goes to which device. Of `n` devices that share the experts each
sends `room` rows to every other. A round of the forward is two all-to-alls of n * room
* embed values (rows there, results back) and one of two fp32 numbers a row; one of the
backward is two of n * room * embed values and one of a number a row. A single device
sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshpar.collectives import asked
from meshpar.model.scope import SAVED_PREFIX
from meshpar.parallel.expert import tiles as tiles_of_rows
from meshpar.parallel.expert.functions import Arrays, Function
from meshpar.parallel.expert.tiles import Tiles, tile_size

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
    """

    mesh_axes: tuple[str, ...]
    num_devices: int
    num_experts: int
    room: int
    function: Function

    @property
    def num_rows(self) -> int:
        """Return the rows that one device receives."""
        return self.num_devices * self.room

    @property
    def tile(self) -> int:
        """Return the rows of a tile."""
        return tile_size(self.num_rows, self.num_experts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """Residuals of a round.

    Args:
        x: Received rows in the order of their experts.
        products: What the experts' function keeps of each row.
        weight: fp32 weight of each row.
        order: The received row at each place; None if they came in that order.
        tiles: Tiles of the rows.
    """

    x: jax.Array
    products: Arrays
    weight: jax.Array
    order: jax.Array | None
    tiles: Tiles


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
    rows = _taken(x_ND, assignment // choices, valid)
    weight = jnp.where(valid, weight_NK.reshape(-1)[assignment], 0.0)
    own = expert_NK.reshape(-1)[assignment] % static.num_experts
    own = jnp.where(valid, own, static.num_experts)
    if static.num_devices > 1:
        rows = _exchange(rows, static.mesh_axes, "expert_dispatch")
        beside = jnp.stack([own.astype(jnp.float32), weight], axis=-1)
        beside = _exchange(beside, static.mesh_axes, "expert_dispatch")
        own, weight = beside[..., 0].astype(jnp.int32), beside[..., 1]
    rows, weight, own = (lax.collapse(array, 0, 2) for array in (rows, weight, own))
    order = None
    if static.num_devices > 1:
        order = jnp.argsort(own, stable=True)
        rows, weight = rows[order], weight[order]
    counts = jnp.sum(own[:, None] == jnp.arange(static.num_experts), axis=0)
    # Named before they are used: a policy that keeps them sends nothing again.
    received = checkpoint_name((rows, weight, counts, order), SENT_ROWS)
    if static.num_devices > 1:
        received = checkpoint_name(received, RECEIVED)
    rows, weight, counts, order = received
    tiles = tiles_of_rows.cut(counts.astype(jnp.int32), static.num_rows, static.tile)
    out, products = tiles_of_rows.forward(
        rows, weight, experts, tiles, static.tile, static.function
    )
    products = tuple(checkpoint_name(array, _PRODUCTS) for array in products)
    kept = Kept(x=rows, products=products, weight=weight, order=order, tiles=tiles)
    back = _returned(static, out, order, "expert_combine")
    results = _at_slots(back, slots(routes, first, static.room))
    summed = results.reshape(tokens, choices, -1).astype(jnp.float32).sum(axis=1)
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
    assignment, valid = sent(routes, first, static.room)
    dy = _taken(dy_ND, assignment // choices, valid)
    if static.num_devices > 1:
        dy = _exchange(dy, static.mesh_axes, "expert_combine_gradient")
    dy = lax.collapse(dy, 0, 2)
    if kept.order is not None:
        dy = dy[kept.order]
    dx, dweight, dexperts = tiles_of_rows.backward(
        kept.x,
        kept.weight,
        experts,
        kept.tiles,
        static.tile,
        static.function,
        kept.products,
        dy,
    )
    name = "expert_dispatch_gradient"
    at = slots(routes, first, static.room)
    dx = _at_slots(_returned(static, dx, kept.order, name), at)
    dweight = _at_slots(_returned(static, dweight, kept.order, name), at)
    tokens = dy_ND.shape[0]
    dx = dx.reshape(tokens, choices, -1).astype(jnp.float32).sum(axis=1)
    return dx, dweight.reshape(tokens, choices), dexperts


def _returned(
    static: Round, rows: jax.Array, order: jax.Array | None, name: str
) -> jax.Array:
    """Send rows, in the order of their experts, back to the devices they came from."""
    if order is None:
        return rows
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
    rows = rows[place].reshape(static.num_devices, static.room, *rows.shape[1:])
    return lax.collapse(_exchange(rows, static.mesh_axes, name), 0, 2)


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
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32))
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
