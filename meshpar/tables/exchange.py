"""Rows from the devices that hold them, and gradients back, by all-to-all.

Each device sends every other the codes that it wants, `room` at most, and gets as many
rows. Where one has more for some device than that, a further round follows: nothing is
ever dropped. A round takes the codes below a bound for each holder, the same from all
devices, so that all that is to be summed up for a row comes in one round. A round of n
devices moves from each

    n * room ids and n * room * dim values          to look up
    n * room ids and n * room * dim values          to update

and beside them one all-reduce of n ids, and one of a number that says whether another
is needed. None of it depends on how many rows there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked
from meshpar.tables.stores import SPREAD, Store

SLACK = 1.25
"""Room over what a holder is asked for on average, were no id there twice."""

LEAST_ROOM = 8


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """How the devices of a mesh share one `spread` store.

    Args:
        store: It.
        mesh_axes: Of all devices.
        num_codes: Different codes that a device may want.
        room: Those that it sends to each device in a round.
    """

    store: Store
    mesh_axes: tuple[str, ...]
    num_codes: int
    room: int

    @classmethod
    def of(cls, store: Store, mesh_axes: tuple[str, ...], examples: int) -> Exchange:
        """With room for what the fullest holder is asked for on average.

        Args:
            store: A `spread` one.
            mesh_axes: Of all devices.
            examples: Of a device.
        """
        num_codes = store.distinct(examples)
        room = min(num_codes, LEAST_ROOM + math.ceil(SLACK * _fullest(store, examples)))
        return cls(store=store, mesh_axes=mesh_axes, num_codes=num_codes, room=room)

    def looked_up(self, rows: jax.Array, codes: jax.Array) -> jax.Array:
        """(codes, dim): the row of every code, zeros for none.

        Args:
            rows: This device's part of the store.
            codes: As `Unique` has them.
        """
        owner = jnp.minimum(codes // self.store.rows, self.store.num_devices - 1)

        def look_up(at: _Round, found: jax.Array) -> jax.Array:
            wanted = sent(self._local(codes, at), self.mesh_axes, "table_ids")
            there = rows.at[wanted].get(mode="fill", fill_value=0)
            back = sent(there, self.mesh_axes, "table_rows")
            place = lax.iota(jnp.int32, len(codes)) - at.first[owner]
            here = (place >= 0) & (place < at.count[owner]) & (codes < self._absent)
            mine = back[owner, jnp.clip(place, 0, self.room - 1)]
            return jnp.where(here[:, None], mine, found)

        found = jnp.zeros((len(codes), self.store.dim), rows.dtype)
        return self._in_rounds(codes, look_up, found)

    def gradients_sent(
        self,
        codes: jax.Array,
        gradients: jax.Array,
        state: Any,
        update: Callable[[Any, jax.Array, jax.Array], Any],
    ) -> Any:
        """The state after `update(state, local rows, gradients)` of every round.

        Args:
            codes: As `Unique` has them.
            gradients: (codes, dim), of each.
            state: What is updated.
            update: Given each local row as often as devices sent gradients of it, and
                the store's `rows` where none was sent.
        """

        def send(at: _Round, state: Any) -> Any:
            taken, valid = self._taken(at)
            values = jnp.where(valid[..., None], gradients[taken], 0.0)
            rows = sent(self._local(codes, at), self.mesh_axes, "table_ids").ravel()
            values = sent(values, self.mesh_axes, "table_row_gradients")
            return update(state, rows, values.reshape(-1, values.shape[-1]))

        return self._in_rounds(codes, send, state)

    @property
    def _absent(self) -> int:
        return self.store.num_codes

    def _in_rounds(
        self, codes: jax.Array, run: Callable[[_Round, Any], Any], carry: Any
    ) -> Any:
        """`carry` after `run` of as many rounds as the fullest device needs."""
        starts = jnp.arange(self.store.num_devices + 1, dtype=jnp.int32)
        bounds = jnp.searchsorted(codes, starts * self.store.rows).astype(jnp.int32)
        first, stop = bounds[:-1], bounds[1:]
        if self.room >= self.num_codes or not self.mesh_axes:
            return run(_Round(first, stop - first), carry)

        def one(state: tuple) -> tuple:
            _, first, carry = state
            end = self._end(codes, first, stop)
            carry = run(_Round(first, end - first), carry)
            with asked("table_rounds"):
                left = lax.pmax(jnp.max(stop - end), self.mesh_axes)
            return left > 0, end, carry

        more = jnp.bool_(True), first, carry
        return lax.while_loop(lambda state: state[0], one, more)[2]

    def _end(self, codes: jax.Array, first: jax.Array, stop: jax.Array) -> jax.Array:
        """Where this round's codes for each device end, of those from `first` on.

        At the code that is one too many for some device, the smallest of all of them.
        """
        last = first + self.room
        too_many = codes.at[last].get(mode="fill", fill_value=self._absent)
        bound = jnp.where(last < stop, too_many, self._absent)
        with asked("table_rounds"):
            bound = lax.pmin(bound, self.mesh_axes)
        return jnp.minimum(jnp.searchsorted(codes, bound).astype(jnp.int32), stop)

    def _taken(self, at: _Round) -> tuple[jax.Array, jax.Array]:
        """(devices, room): places in the codes, and whether anything is sent there."""
        number = lax.iota(jnp.int32, self.room)[None]
        return at.first[:, None] + number, number < at.count[:, None]

    def _local(self, codes: jax.Array, at: _Round) -> jax.Array:
        """(devices, room): the local row wanted of each, its `rows` for none."""
        taken, valid = self._taken(at)
        device = lax.iota(jnp.int32, self.store.num_devices)[:, None]
        wanted = codes.at[taken].get(mode="clip") - device * self.store.rows
        return jnp.where(valid, wanted, self.store.rows)


def sent(parts: jax.Array, mesh_axes: tuple[str, ...], name: str) -> jax.Array:
    """Part `i` to device `i`, and the parts of all devices for this one.

    Args:
        parts: (devices, ...).
        mesh_axes: Of all devices; none where there is one alone.
        name: What the all-to-all is asked for.
    """
    if not mesh_axes:
        return parts
    with asked(name):
        return lax.all_to_all(parts, mesh_axes, 0, 0, tiled=True)


@dataclass(frozen=True)
class _Round:
    """Where in the codes each device's part begins, and how many it has."""

    first: jax.Array
    count: jax.Array


def _fullest(store: Store, examples: int) -> float:
    """Ids of a device's examples that the most asked holder has, on average."""
    if store.kind != SPREAD:
        return 0.0
    everywhere, own = 0.0, [0.0] * store.num_devices
    for member in store.members:
        ids = min(examples * member.table.lookups, member.table.rows)
        if member.device is None:
            everywhere += ids / store.num_devices
        else:
            own[member.device] += ids
    return everywhere + max(own)
