"""One device's part of the work with all tables: first values, lookups, updates.

The batch is split over the batch axes. Devices with the same part of it, along the
other mesh axes, share its examples: each looks up rows for its own, and one all-gather
of (examples, features, dim) values over those axes brings them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_2x32

from meshpar.collectives import asked
from meshpar.layout import BATCH_AXES
from meshpar.tables.exchange import (
    Exchange,
    Unique,
    positions,
    sent,
    summed,
    summed_runs,
    unique,
)
from meshpar.tables.optimizers import ROWS, TableOptimizer, array_structs
from meshpar.tables.stores import COLUMNS, SPREAD, Member, Store
from meshpar.tables.table import ABSENT

_GATHERED = {COLUMNS: "table_ids_gather", "replicated": "table_replicas"}
Arrays = Mapping[str, jax.Array]

_SALT = 0x7AB1E
"""Tells the tables' key from those of the model's parameters."""

_BLOCK_VALUES = 2**22
"""Drawn at once; 64 MB of temporary memory."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of a batch among the devices of a mesh.

    Args:
        mesh_axes: Mesh axes larger than 1.
        replica_axes: Those of them along which the batch is not split.
        sizes: Size of each mesh axis.
    """

    mesh_axes: tuple[str, ...]
    replica_axes: tuple[str, ...]
    sizes: Mapping[str, int]

    @property
    def num_replicas(self) -> int:
        """Devices that have the same part of the batch."""
        return math.prod(self.sizes[axis] for axis in self.replica_axes)

    def local_examples(self, array: jax.Array, fill: Any) -> jax.Array:
        """Return this device's even share, padded, of its part of the batch."""
        if self.num_replicas == 1:
            return array
        size = -(-len(array) // self.num_replicas)
        missing = size * self.num_replicas - len(array)
        pads = [(0, missing), *[(0, 0)] * (array.ndim - 1)]
        padded = jnp.pad(array, pads, constant_values=fill)
        at = lax.axis_index(self.replica_axes) * size
        return lax.dynamic_slice_in_dim(padded, at, size)

    def local_batch(self, batch: Arrays) -> dict[str, jax.Array]:
        """Return this device's share of ids, as int32, and of their weights."""
        return {
            # Ids may be unsigned, or narrow.
            name: self.local_examples(array.astype(jnp.int32), ABSENT)
            if jnp.issubdtype(array.dtype, jnp.integer)
            else self.local_examples(array, 0)
            for name, array in batch.items()
        }

    def gathered(self, local: jax.Array, examples: int) -> jax.Array:
        """Return all examples of the part, given each device's local ones."""
        if self.num_replicas == 1:
            return local
        with asked("table_batch_gather"):
            return lax.all_gather(local, self.replica_axes, tiled=True)[:examples]

    def device_examples(self, examples: int) -> list[np.ndarray]:
        """Return the examples of a global batch that each device looks up."""
        ranges = []
        for place in np.ndindex(*(self.sizes[axis] for axis in self.mesh_axes)):
            at = dict(zip(self.mesh_axes, place, strict=True))
            split = tuple(axis for axis in BATCH_AXES if axis in at)
            length = examples // math.prod(self.sizes[axis] for axis in split)
            size = -(-length // self.num_replicas)
            part = self._number(split, at) * length
            replica = self._number(self.replica_axes, at)
            first, last = (min(one * size, length) for one in (replica, replica + 1))
            ranges.append(np.arange(part + first, part + last))
        return ranges

    def _number(self, axes: tuple[str, ...], at: Mapping[str, int]) -> int:
        """Return a device's number along some mesh axes, the first the slowest."""
        number = 0
        for axis in axes:
            number = number * self.sizes[axis] + at[axis]
        return number


@dataclass(frozen=True, kw_only=True)
class LocalTables:
    """Lookups and updates by one device, inside `jax.shard_map`.

    Args:
        stores: Stores of all tables.
        shares: Shares of the batch.
        optimizer: Optimizer of the rows.
        outputs: Input of the model -> its features, in order.
    """

    stores: tuple[Store, ...]
    shares: Shares
    optimizer: TableOptimizer
    outputs: Mapping[str, tuple[str, ...]]

    def looked_up(
        self, state: Mapping[str, Arrays], batch: Arrays
    ) -> tuple[dict[str, jax.Array], dict[str, Unique]]:
        """Return each output of this part of the batch, and the ids for `updated`.

        Args:
            state: Store -> this device's part of its arrays.
            batch: Ids and weights of this part of the batch.
        """
        examples = len(next(iter(batch.values())))
        local = self.shares.local_batch(batch)
        vectors: dict[str, jax.Array] = {}
        kept = {}
        for store in self.stores:
            ids = unique(*positions(store, local), store.num_codes)
            rows = self._rows(store, state[store.name][ROWS], ids)
            at_position = rows.at[ids.slot].get(mode="fill", fill_value=0)
            vectors |= _pooled(store, local, at_position * ids.weight[:, None])
            kept[store.name] = jax.tree.map(lambda leaf: leaf[None], ids)
        outputs = {}
        for name, features in self.outputs.items():
            pooled = jnp.stack([vectors[feature] for feature in features], axis=1)
            outputs[name] = self.shares.gathered(pooled, examples)
        return outputs, kept

    def updated(
        self,
        state: Mapping[str, Arrays],
        kept: Mapping[str, Unique],
        gradients: Arrays,
        count: jax.Array,
        finite: jax.Array,
    ) -> dict[str, dict[str, jax.Array]]:
        """Return the arrays with touched rows updated, in place where donated.

        Args:
            state: Store -> this device's part of its arrays.
            kept: Ids from `looked_up`.
            gradients: Gradients of its outputs.
            count: Updates done before.
            finite: If False, nothing changes.
        """
        local = {
            name: self.shares.local_examples(array, 0)
            for name, array in gradients.items()
        }
        feature_gradients = {
            feature: local[name][:, at]
            for name, features in self.outputs.items()
            for at, feature in enumerate(features)
        }
        new = {}
        for store in self.stores:
            ids = jax.tree.map(lambda leaf: leaf[0], kept[store.name])
            sums = _code_gradients(store, ids, feature_gradients)
            codes = jnp.where(finite, ids.codes, store.num_codes)
            ids = replace(ids, codes=codes)
            new[store.name] = self._updated(
                store, dict(state[store.name]), ids, sums, count
            )
        return new

    def _rows(self, store: Store, rows: jax.Array, ids: Unique) -> jax.Array:
        """Return (codes, dim): the row of each code, zeros for none."""
        codes = ids.codes
        if store.kind == SPREAD:
            return self._exchange(store, ids).looked_up(rows, codes)
        if store.kind == "replicated" or not self.shares.mesh_axes:
            return rows.at[codes].get(mode="fill", fill_value=0)
        with asked("table_ids_gather"):
            everyones = lax.all_gather(codes, self.shares.mesh_axes)
        parts = rows.at[everyones].get(mode="fill", fill_value=0)
        with asked("table_rows"):
            return lax.all_to_all(parts, self.shares.mesh_axes, 0, 2, tiled=True)[0]

    def _updated(
        self,
        store: Store,
        state: dict[str, jax.Array],
        ids: Unique,
        gradients: jax.Array,
        count: jax.Array,
    ) -> dict[str, jax.Array]:
        def update(state: Any, rows: jax.Array, gradients: jax.Array) -> Any:
            return self._update_rows(store, state, rows, gradients, count)

        codes, axes = ids.codes, self.shares.mesh_axes
        if store.kind == SPREAD:
            exchange = self._exchange(store, ids)
            return exchange.gradients_sent(codes, gradients, state, update)
        if axes:
            with asked(_GATHERED[store.kind]):
                codes = lax.all_gather(codes, axes, tiled=True)
            gradients = self._columns(store, gradients)
        return update(state, codes, gradients)

    def _columns(self, store: Store, gradients: jax.Array) -> jax.Array:
        """Return all devices' gradients, this device's columns of them."""
        axes = self.shares.mesh_axes
        if store.kind == "replicated":
            with asked("table_replicas"):
                return lax.all_gather(gradients, axes, tiled=True)
        parts = gradients.reshape(len(gradients), -1, store.local_dim)
        mine = sent(parts.swapaxes(0, 1), axes, "table_row_gradients")
        return mine.reshape(-1, store.local_dim)

    def _update_rows(
        self,
        store: Store,
        state: dict[str, jax.Array],
        rows: jax.Array,
        gradients: jax.Array,
        count: jax.Array,
    ) -> dict[str, jax.Array]:
        """Return the state with those local rows updated; rows may be repeated."""
        rows, gradients = summed(rows, gradients, store.rows)
        old = {
            name: array.at[rows].get(mode="fill", fill_value=0)
            for name, array in state.items()
        }
        # The barrier keeps reads from fusing with the write, which would then copy the
        # whole array.
        old, gradients = lax.optimization_barrier((old, gradients))
        slots = {name: old[name] for name in self.optimizer.slots}
        new, slots = self.optimizer.update(
            old[ROWS],
            gradients,
            slots,
            count=count,
            mean_square=self._mean_square(store),
        )
        written = {ROWS: new, **slots}
        return {
            name: array.at[rows].set(
                written[name], mode="drop", unique_indices=True, indices_are_sorted=True
            )
            for name, array in state.items()
        }

    def _mean_square(self, store: Store) -> Callable[[jax.Array], jax.Array]:
        def mean_square(gradients: jax.Array) -> jax.Array:
            total = jnp.sum(gradients * gradients, axis=1)
            if store.kind == COLUMNS and self.shares.mesh_axes:
                with asked("table_norms"):
                    total = lax.psum(total, self.shares.mesh_axes)
            return total / store.dim

        return mean_square

    def _exchange(self, store: Store, ids: Unique) -> Exchange:
        examples = len(ids.slot) // store.lookups
        return Exchange.for_examples(store, self.shares.mesh_axes, examples)


def _pooled(store: Store, batch: Arrays, weighted: jax.Array) -> dict[str, jax.Array]:
    """Return feature -> (examples, dim) sums over bags of weighted rows."""
    pooled, at = {}, 0
    for feature, _ in store.features:
        shape = batch[feature].shape
        end = at + math.prod(shape)
        pooled[feature] = weighted[at:end].reshape(*shape, store.dim).sum(axis=1)
        at = end
    return pooled


def _code_gradients(store: Store, ids: Unique, gradients: Arrays) -> jax.Array:
    """Return (codes, dim): each code's gradient over this device's examples."""
    at_positions = jnp.concatenate(
        [
            jnp.repeat(gradients[feature], member.table.bag, axis=0)
            for feature, member in store.features
        ]
    )
    slot, weight = ids.slot[ids.order], ids.weight[ids.order]
    values = at_positions[ids.order] * weight[:, None]
    return summed_runs(values, slot, len(ids.codes))


def first_arrays(
    store: Store,
    optimizer: TableOptimizer,
    seed: jax.Array,
    device: jax.Array | int,
) -> dict[str, jax.Array]:
    """Return this device's part of a store: its rows, and their optimizer state.

    A first value depends on seed, table, row and column, and not on the placement:

        value = bound * (2 * u - 1),   u uniform from 0 to 1 by Threefry-2x32 (Salmon et
        al. 2011), keyed by the seed, of counters (row, table's place * 65536 + column)

    Args:
        store: The store.
        optimizer: Optimizer of the rows.
        seed: Seed of the run, a uint32 scalar.
        device: This device's number along all mesh axes.
    """
    rows = jnp.zeros((store.rows, store.local_dim), jnp.float32)
    for member in store.members:
        rows = _drawn_into(rows, store, member, seed, device)
    structs = array_structs(optimizer, store.rows, store.local_dim)
    slots = {
        name: jnp.full(structs[name].shape, slot.first, jnp.float32)
        for name, slot in optimizer.slots.items()
    }
    return {ROWS: rows, **slots}


def _drawn_into(
    rows: jax.Array,
    store: Store,
    member: Member,
    seed: jax.Array,
    device: jax.Array | int,
) -> jax.Array:
    """Return the store's rows with a table's run drawn, if this device has it."""
    length = store.run_length(member)
    columns = jnp.arange(store.local_dim)
    if store.kind == COLUMNS:
        columns = columns + device * store.local_dim
    block = max(1, min(length, _BLOCK_VALUES // store.local_dim))
    num_blocks = -(-length // block)
    has_table = True if member.device is None else device == member.device

    def draw(at: jax.Array, rows: jax.Array) -> jax.Array:
        # The last block begins earlier, where the rows do not divide.
        first = jnp.minimum(at * block, length - block)
        table_rows = first + jnp.arange(block)
        if store.is_cyclic(member):
            table_rows = table_rows * store.num_devices + device
        drawn = _first_values(member, seed, table_rows, columns)
        start = member.first + first
        old = lax.dynamic_slice_in_dim(rows, start, block)
        return lax.dynamic_update_slice_in_dim(
            rows, jnp.where(has_table, drawn, old), start, 0
        )

    return lax.fori_loop(0, num_blocks, draw, rows)


def _first_values(
    member: Member, seed: jax.Array, rows: jax.Array, columns: jax.Array
) -> jax.Array:
    """Return fp32 (rows, columns) first values; zeros for rows past the table's."""
    key = jax.random.key(seed, impl="threefry2x32")
    key = jax.random.key_data(jax.random.fold_in(key, _SALT))
    shape = len(rows), len(columns)
    column = jnp.uint32(member.place << 16) + columns.astype(jnp.uint32)
    counters = [
        jnp.broadcast_to(rows.astype(jnp.uint32)[:, None], shape).ravel(),
        jnp.broadcast_to(column, shape).ravel(),
    ]
    bits = threefry_2x32(key, jnp.concatenate(counters))[: shape[0] * shape[1]]
    uniform = (bits >> 8).astype(jnp.float32) * 2.0**-24
    drawn = member.table.initial_bound * (2 * uniform - 1)
    exists = rows < member.table.rows
    return jnp.where(exists[:, None], drawn.reshape(shape), 0.0)
