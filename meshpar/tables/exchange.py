"""Ids made unique on each device; their rows and gradients exchanged by all-to-all.

Every device handles its own share of the examples; an id that occurs in it more than
once is looked up, sent and summed once.

Each device sends every other the codes that it wants, `room` at most, and receives as
many rows. If it wants more from some device, a further round follows: nothing is ever
dropped. A round takes the codes below a bound for each holder, the same from all
devices, so that all gradients of a row come in one round. A round of n devices moves
from each

    n * room ids and n * room * dim values          to look up
    n * room ids and n * room * dim values          to update

besides one all-reduce of n ids, and one of a number that says whether another round is
needed. None of it depends on how many rows there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked
from meshpar.tables.stores import SPREAD, Store
from meshpar.tables.table import ABSENT, Table, weights_name

SLACK = 1.25
"""Room over what a holder is asked for on average, if no id occurred twice."""

LEAST_ROOM = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unique:
    """The different ids of a device's examples, in one store.

    Args:
        codes: Sorted, each once, then the store's `num_codes`; (slots,).
        slot: Index into `codes` of each position's id; (positions,), `slots` for none.
        order: The positions, those of equal ids together.
        weight: fp32 weight of each position in its bag's vector.
    """

    codes: jax.Array
    slot: jax.Array
    order: jax.Array
    weight: jax.Array


def positions(
    store: Store, batch: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return the code and the weight of every id of a store's features, in order."""
    codes, weights = [], []
    for feature, member in store.features:
        # Narrow ids would wrap where codes are computed.
        table, ids = member.table, batch[feature].astype(jnp.int32)
        rows, absent, outside = _rows(table, ids)
        given = batch.get(weights_name(feature))
        weight = jnp.ones(ids.shape) if given is None else given.astype(jnp.float32)
        weight = jnp.where(absent, 0.0, weight)
        if table.pooling == "mean":
            total = jnp.sum(weight, axis=1, keepdims=True)
            weight = jnp.where(
                total == 0, 0.0, weight / jnp.where(total == 0, 1, total)
            )
        codes.append(jnp.where(absent, store.num_codes, store.codes(member, rows)))
        weights.append(jnp.where(outside, jnp.nan, weight))
    flat = [jnp.concatenate([one.ravel() for one in many]) for many in (codes, weights)]
    return flat[0].astype(jnp.int32), flat[1]


def _rows(table: Table, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the rows of ids, which ids are absent, and which are outside."""
    absent, never = ids == ABSENT, jnp.zeros(ids.shape, bool)
    if table.hashed:
        return hashed(ids, table.rows), absent, never
    outside = ~absent & ((ids < 0) | (ids >= table.rows))
    if table.bucket is not None:
        return jnp.where(outside, table.bucket, ids), absent, never
    return jnp.where(outside, 0, ids), absent, outside


def hashed(ids: jax.Array, rows: int) -> jax.Array:
    """Return a row for any int32: Murmur3's finalizer (Appleby 2016), modulo `rows`.

    Example:
        >>> hashed(jnp.asarray([0, 1, 1 << 30]), 1000).tolist()
        [0, 727, 532]
    """
    mixed = ids.astype(jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return ((mixed ^ (mixed >> 16)) % jnp.uint32(rows)).astype(jnp.int32)


def unique(codes: jax.Array, weight: jax.Array, absent: int) -> Unique:
    """Return the different codes of all positions.

    Args:
        codes: (positions,), `absent` for none.
        weight: (positions,).
        absent: Above all codes.
    """
    size = min(len(codes), absent)
    ordered, order, slot = _sorted_slots(codes)
    distinct = jnp.full(size, absent, jnp.int32)
    # Equal codes write the same value; absent ones that do not fit are dropped.
    distinct = distinct.at[slot].set(ordered, mode="drop", indices_are_sorted=True)
    position_slot = jnp.zeros_like(slot).at[order].set(slot, unique_indices=True)
    return Unique(
        codes=distinct,
        slot=jnp.where(codes == absent, size, position_slot),
        order=order,
        weight=weight,
    )


def summed(
    codes: jax.Array, values: jax.Array, absent: int
) -> tuple[jax.Array, jax.Array]:
    """Return each code once, and the sum of its values.

    Args:
        codes: (n,), in any order, `absent` for none.
        values: (n, dim).
        absent: Above all codes.

    Returns:
        Sorted codes (n,), filled up with different codes from `absent` on; sums
        (n, dim).
    """
    ordered, order, slot = _sorted_slots(codes)
    distinct = jnp.full(len(codes), absent, jnp.int32)
    distinct = distinct.at[slot].set(ordered, indices_are_sorted=True)
    filling = absent + jnp.arange(len(codes))
    distinct = jnp.where(distinct == absent, filling, distinct)
    return distinct, summed_runs(values[order], slot, len(codes))


def summed_runs(values: jax.Array, slot: jax.Array, size: int) -> jax.Array:
    """Return (size, dim) sums of the rows of each slot; `slot` is sorted."""
    zeros = jnp.zeros((size, values.shape[1]), values.dtype)
    return zeros.at[slot].add(values, mode="drop", indices_are_sorted=True)


def _sorted_slots(codes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return sorted codes, where each was, and how many different ones precede it."""
    places = lax.iota(jnp.int32, len(codes))
    ordered, order = lax.sort((codes, places), num_keys=1)
    is_new = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])
    return ordered, order, jnp.cumsum(is_new.astype(jnp.int32))


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Exchange of the rows of one `spread` store among the devices of a mesh.

    Args:
        store: The store.
        mesh_axes: Mesh axes over all devices.
        num_codes: Different codes that a device may want.
        room: Codes that it sends to each device in a round.
    """

    store: Store
    mesh_axes: tuple[str, ...]
    num_codes: int
    room: int

    @classmethod
    def for_examples(
        cls, store: Store, mesh_axes: tuple[str, ...], examples: int
    ) -> Exchange:
        """Return an exchange with room for what the fullest holder sends on average.

        Args:
            store: A `spread` store.
            mesh_axes: Mesh axes over all devices.
            examples: Examples of a device.
        """
        num_codes = store.distinct(examples)
        room = min(num_codes, LEAST_ROOM + math.ceil(SLACK * _fullest(store, examples)))
        return cls(store=store, mesh_axes=mesh_axes, num_codes=num_codes, room=room)

    def looked_up(self, rows: jax.Array, codes: jax.Array) -> jax.Array:
        """Return (codes, dim): the row of every code, zeros for none.

        Args:
            rows: This device's part of the store.
            codes: `Unique.codes`.
        """
        owner = jnp.minimum(codes // self.store.rows, self.store.num_devices - 1)

        def look_up(at: _Round, received: jax.Array) -> jax.Array:
            wanted = sent(self._local(codes, at), self.mesh_axes, "table_ids")
            held = rows.at[wanted].get(mode="fill", fill_value=0)
            back = sent(held, self.mesh_axes, "table_rows")
            place = lax.iota(jnp.int32, len(codes)) - at.first[owner]
            in_round = (place >= 0) & (place < at.count[owner]) & (codes < self._absent)
            mine = back[owner, jnp.clip(place, 0, self.room - 1)]
            return jnp.where(in_round[:, None], mine, received)

        received = jnp.zeros((len(codes), self.store.dim), rows.dtype)
        return self._in_rounds(codes, look_up, received)

    def gradients_sent(
        self,
        codes: jax.Array,
        gradients: jax.Array,
        state: Any,
        update: Callable[[Any, jax.Array, jax.Array], Any],
    ) -> Any:
        """Return the state after `update(state, local rows, gradients)` of every round.

        Args:
            codes: `Unique.codes`.
            gradients: (codes, dim) gradient of each.
            state: The state to update.
            update: Receives each local row as often as devices sent gradients of it,
                and the store's `rows` where none was sent.
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
        """Return `carry` after `run` of as many rounds as the fullest device needs."""
        starts = jnp.arange(self.store.num_devices + 1, dtype=jnp.int32)
        bounds = jnp.searchsorted(codes, starts * self.store.rows).astype(jnp.int32)
        first, stop = bounds[:-1], bounds[1:]
        if self.room >= self.num_codes or not self.mesh_axes:
            return run(_Round(first, stop - first), carry)

        def run_round(state: tuple) -> tuple:
            _, first, carry = state
            end = self._end(codes, first, stop)
            carry = run(_Round(first, end - first), carry)
            with asked("table_rounds"):
                left = lax.pmax(jnp.max(stop - end), self.mesh_axes)
            return left > 0, end, carry

        more = jnp.bool_(True), first, carry
        return lax.while_loop(lambda state: state[0], run_round, more)[2]

    def _end(self, codes: jax.Array, first: jax.Array, stop: jax.Array) -> jax.Array:
        """Return where this round's codes for each device end, from `first` on.

        The bound is the smallest code that is one too many for some device.
        """
        last = first + self.room
        too_many = codes.at[last].get(mode="fill", fill_value=self._absent)
        bound = jnp.where(last < stop, too_many, self._absent)
        with asked("table_rounds"):
            bound = lax.pmin(bound, self.mesh_axes)
        return jnp.minimum(jnp.searchsorted(codes, bound).astype(jnp.int32), stop)

    def _taken(self, at: _Round) -> tuple[jax.Array, jax.Array]:
        """Return (devices, room) places in the codes, and whether each is sent."""
        number = lax.iota(jnp.int32, self.room)[None]
        return at.first[:, None] + number, number < at.count[:, None]

    def _local(self, codes: jax.Array, at: _Round) -> jax.Array:
        """Return (devices, room) local rows wanted of each, `rows` for none."""
        taken, valid = self._taken(at)
        device = lax.iota(jnp.int32, self.store.num_devices)[:, None]
        wanted = codes.at[taken].get(mode="clip") - device * self.store.rows
        return jnp.where(valid, wanted, self.store.rows)


def sent(parts: jax.Array, mesh_axes: tuple[str, ...], name: str) -> jax.Array:
    """Send part `i` to device `i`; return the parts of all devices for this one.

    Args:
        parts: (devices, ...).
        mesh_axes: Mesh axes over all devices; none for a single device.
        name: Purpose of the all-to-all.
    """
    if not mesh_axes:
        return parts
    with asked(name):
        return lax.all_to_all(parts, mesh_axes, 0, 0, tiled=True)


@dataclass(frozen=True)
class _Round:
    """First code of each device's part of a round, and how many it has."""

    first: jax.Array
    count: jax.Array


def _fullest(store: Store, examples: int) -> float:
    """Return the ids of a device's examples that the fullest holder has, on average."""
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
