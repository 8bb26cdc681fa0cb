"""Which assignments of tokens to experts go to which device, in which round."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routes:
    """A device's assignments of tokens to experts, in the order of the devices.

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

    @property
    def num_devices(self) -> int:
        """Return the number of devices that share the experts."""
        return self.ends.shape[0] - 1

    @property
    def counts(self) -> jax.Array:
        """Return the assignments to each device, int32."""
        return self.ends[1:] - self.ends[:-1]

    def ranks(self, first: jax.Array | int = 0) -> jax.Array:
        """Return the place of each assignment among those to its device.

        Args:
            first: As for `sent`; their places come before 0.
        """
        device = jnp.minimum(self.device, self.num_devices - 1)
        before = self.ends[:-1] + first
        return self.place - before[device]


def make_routes(
    experts: jax.Array, num_experts: int, num_devices: int, *, by_token: bool = False
) -> Routes:
    """Return the routes of a device's tokens.

    Args:
        experts: (tokens, choices) int32; `num_experts` for a dropped assignment.
        num_experts: Experts of all devices together, equally many on each.
        num_devices: Devices that share them.
        by_token: Whether assignments to a device are in the order of their tokens, not
            in that of their experts.
    """
    flat = experts.reshape(-1)
    device = flat // (num_experts // num_devices)
    order = jnp.argsort(device if by_token else flat, stable=True).astype(jnp.int32)
    # Not `jnp.searchsorted`, which is a loop of small kernels.
    bounds = jnp.arange(num_devices + 1, dtype=jnp.int32)
    ends = jnp.sum(device[:, None] < bounds, axis=0, dtype=jnp.int32)
    return Routes(order=order, place=inverse(order), device=device, ends=ends)


def inverse(order: jax.Array) -> jax.Array:
    """Return the inverse of a permutation, int32."""
    return (
        jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
    )


def sent(
    routes: Routes, first: jax.Array | int, room: int
) -> tuple[jax.Array, jax.Array]:
    """Return the assignments of a round, (devices, room), and which are valid.

    Args:
        routes: A device's routes.
        first: Assignments that went to each device before.
        room: Assignments that go to each device.
    """
    begin = routes.ends[:-1] + first
    at = begin[:, None] + jnp.arange(room, dtype=jnp.int32)
    valid = at < routes.ends[1:, None]
    return routes.order[jnp.where(valid, at, 0)], valid


def slots(routes: Routes, first: jax.Array | int, room: int) -> jax.Array:
    """Return the index of each assignment in (devices * room); past its end if absent.

    Args:
        routes: A device's routes.
        first: As for `sent`.
        room: As for `sent`.
    """
    num_devices = routes.num_devices
    device = jnp.minimum(routes.device, num_devices - 1)
    rank = routes.ranks(first)
    here = (rank >= 0) & (rank < room) & (routes.device < num_devices)
    return jnp.where(here, device * room + rank, num_devices * room)
