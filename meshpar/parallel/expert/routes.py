"""Which row goes to which device, in rounds of as many rows to each."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routes:
    """A device's assignments of tokens to experts, in the order of their experts.

    Args:
        order: (assignments,) int32, the assignment at each place of the order.
        place: (assignments,) int32, its inverse.
        device: (assignments,) int32, the device of each assignment's expert; as many as
            there are devices for one that was dropped.
        ends: (devices + 1,) int32, where the assignments to each device begin and end.
    """

    order: jax.Array
    place: jax.Array
    device: jax.Array
    ends: jax.Array


def routes_of(experts: jax.Array, num_experts: int, num_devices: int) -> Routes:
    """The routes of a device's tokens.

    Args:
        experts: (tokens, choices) int32; `num_experts` for an assignment that was
            dropped.
        num_experts: Of all devices together, as many on each.
        num_devices: Devices that share them.
    """
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32))
    device = flat // (num_experts // num_devices)
    bounds = jnp.arange(num_devices + 1, dtype=jnp.int32)
    ends = jnp.searchsorted(device[order], bounds).astype(jnp.int32)
    return Routes(order=order, place=place, device=device, ends=ends)


def most_for_one(routes: Routes) -> jax.Array:
    """The most assignments that one device gets, int32."""
    return jnp.max(routes.ends[1:] - routes.ends[:-1])


def sent(
    routes: Routes, first: jax.Array | int, room: int
) -> tuple[jax.Array, jax.Array]:
    """The assignments of a round, (devices, room), and which of them are any.

    Args:
        routes: A device's routes.
        first: How many to each device went before.
        room: How many go to each.
    """
    at = routes.ends[:-1, None] + first + jnp.arange(room, dtype=jnp.int32)
    valid = at < routes.ends[1:, None]
    return routes.order[jnp.where(valid, at, 0)], valid


def slots(routes: Routes, first: jax.Array | int, room: int) -> jax.Array:
    """Where in (devices * room) a round has each assignment; past it where it has not.

    Args:
        routes: A device's routes.
        first: As for `sent`, and so `room`.
        room: How many go to each device.
    """
    num_devices = routes.ends.shape[0] - 1
    device = jnp.minimum(routes.device, num_devices - 1)
    rank = routes.place - routes.ends[device] - first
    here = (rank >= 0) & (rank < room) & (routes.device < num_devices)
    return jnp.where(here, device * room + rank, num_devices * room)
