"""The exchange of rows in which each goes to each of its experts' devices by itself.

`host_exchange.HostExchange` has the same methods and sends a row once to each host. A
part of an exchange is sent by itself, so that matmuls of other parts hide it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked
from meshpar.parallel.expert.routes import Routes, sent, slots

Hops = tuple[Callable[[jax.Array], jax.Array], ...]
"""Functions of a part of the rows, applied one after another; each communicates."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One round's rows of a device, to their experts' devices and back.

    Args:
        mesh_axes: Mesh axes that split the experts; none if nothing is sent.
        room: Rows to each device.
        routes: Routes of the tokens.
        first: Rows that went to each device in the rounds before.
        choices: Experts of a token.
    """

    mesh_axes: tuple[str, ...]
    room: int
    routes: Routes
    first: jax.Array | int
    choices: int

    @cached_property
    def sent(self) -> tuple[jax.Array, jax.Array]:
        """Return the assignments to each device, (devices, room), and if valid."""
        return sent(self.routes, self.first, self.room)

    @property
    def num_sent(self) -> jax.Array:
        """Return how many assignments to each device need no further round, int32."""
        return jnp.minimum(self.routes.counts, self.first + self.room)

    def rows(self, x_ND: jax.Array, part: int, parts: int) -> jax.Array:
        """Return a part of the rows to send; zeros where there is no assignment."""
        assignment, valid = self.sent
        rows = jnp.where(valid[..., None], x_ND[assignment // self.choices], 0)
        return self._part(rows, part, parts)

    def dispatch(self, part: int, parts: int, name: str) -> Hops:
        """Return what sends a part of the rows; (rows, embed) arrive.

        One all-to-all of the part.
        """
        return (lambda rows: lax.collapse(self.send_numbers(rows, name), 0, 2),)

    def combine(self, part: int, parts: int, name: str) -> Hops:
        """Return what sends the results of a part back: one all-to-all of it."""

        def send(results: jax.Array) -> jax.Array:
            rows = results.reshape(self.routes.num_devices, -1, results.shape[-1])
            return lax.collapse(self.send_numbers(rows, name), 0, 2)

        return (send,)

    def sums(self, returned: Sequence[jax.Array]) -> jax.Array:
        """Return fp32 sums of each token's results, of all parts that came back."""
        at = slots(self.routes, self.first, self.room)
        rows = at_index(
            jnp.concatenate(returned), self.in_parts(at, len(returned))
        ).reshape(-1, self.choices, returned[0].shape[-1])
        return rows.astype(jnp.float32).sum(axis=1)

    def send_numbers(self, numbers: jax.Array, name: str) -> jax.Array:
        """Return numbers of the rows, (devices, room, ...), as receivers have them."""
        if not self.mesh_axes:
            return numbers
        return all_to_all(numbers, self.mesh_axes, name)

    def return_numbers(self, numbers: jax.Array, name: str) -> jax.Array:
        """Return numbers of received rows, (devices, room), by token and choice."""
        returned = self.send_numbers(numbers, name).reshape(-1)
        at = slots(self.routes, self.first, self.room)
        return at_index(returned, at).reshape(-1, self.choices)

    def row_parts(self, parts: int) -> jax.Array:
        """Return the part of each received row, broadcast against (devices, room)."""
        rank = jnp.arange(self.room, dtype=jnp.int32)
        return rank // (self.room // parts)

    def in_part(self, index: jax.Array, part: int, parts: int) -> jax.Array:
        """Convert an index of received rows to one of a part of them.

        An index of another part becomes any number.
        """
        room = self.room // parts
        return index // self.room * room + index % self.room - part * room

    def in_parts(self, index: jax.Array, parts: int) -> jax.Array:
        """Convert an index of received rows to one of all parts after one another.

        An index past the end stays there.
        """
        num_devices = self.routes.num_devices
        room = self.room // parts
        device, rank = index // self.room, index % self.room
        moved = (rank // room * num_devices + device) * room + rank % room
        return jnp.where(index < num_devices * self.room, moved, index)

    def part_values(self, by_row: jax.Array, part: int, parts: int) -> jax.Array:
        """Return values of received rows, (rows,), as a part of the rows has them."""
        by_row = by_row.reshape(self.routes.num_devices, self.room)
        return self._part(by_row, part, parts).reshape(-1)

    def _part(self, rows: jax.Array, part: int, parts: int) -> jax.Array:
        room = self.room // parts
        return rows[:, part * room : (part + 1) * room]


def all_to_all(
    rows: jax.Array,
    mesh_axes: tuple[str, ...],
    name: str,
    groups: Sequence[Sequence[int]] | None = None,
) -> jax.Array:
    """Send part `i` of dim 0 to device `i`, and receive the parts for this device.

    Args:
        rows: Rows to each device.
        mesh_axes: Mesh axes of the devices.
        name: Name in `ASKED`.
        groups: Groups of devices that exchange rows; None for one of all.
    """
    with asked(name):
        return lax.all_to_all(
            rows,
            mesh_axes,
            split_axis=0,
            concat_axis=0,
            tiled=True,
            axis_index_groups=groups,
        )


def at_index(rows: jax.Array, at: jax.Array) -> jax.Array:
    """Return rows by their index; zeros past the end."""
    return rows.at[at].get(mode="fill", fill_value=0)
