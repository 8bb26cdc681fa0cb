"""Lookups and updates of all tables, as one device of the mesh does its part.

The batch is split over the batch axes; the devices that have the same part of it, along
the other mesh axes, share its examples, look up rows for their own, and gather what the
others found: one all-gather of (examples, features, dim) values over those axes.
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

from meshpar.collectives import asked
from meshpar.layout import BATCH_AXES
from meshpar.tables.exchange import Exchange, sent
from meshpar.tables.ids import Unique, positions, summed, summed_runs, unique
from meshpar.tables.optimizers import ROWS, TableOptimizer
from meshpar.tables.stores import SPREAD, Store
from meshpar.tables.table import ABSENT

_GATHERED = {"columns": "table_ids_gather", "replicated": "table_replicas"}
Arrays = Mapping[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How the devices of a mesh share a batch.

    Args:
        mesh_axes: Of all devices, those of size 1 left out.
        beside: Those of them along which the batch is not split.
        sizes: Of each.
    """

    mesh_axes: tuple[str, ...]
    beside: tuple[str, ...]
    sizes: Mapping[str, int]

    @property
    def num_beside(self) -> int:
        """Devices that have the same part of the batch."""
        return math.prod(self.sizes[axis] for axis in self.beside)

    def own(self, array: jax.Array, fill: Any) -> jax.Array:
        """This device's examples of its part of the batch, filled up to even shares."""
        if self.num_beside == 1:
            return array
        size = -(-len(array) // self.num_beside)
        missing = size * self.num_beside - len(array)
        pads = [(0, missing), *[(0, 0)] * (array.ndim - 1)]
        filled = jnp.pad(array, pads, constant_values=fill)
        at = lax.axis_index(self.beside) * size
        return lax.dynamic_slice_in_dim(filled, at, size)

    def of_devices(self, examples: int) -> list[np.ndarray]:
        """Which examples of a global batch `own` gives each device, by its number."""
        found = []
        for place in np.ndindex(*(self.sizes[axis] for axis in self.mesh_axes)):
            at = dict(zip(self.mesh_axes, place, strict=True))
            split = tuple(axis for axis in BATCH_AXES if axis in at)
            length = examples // math.prod(self.sizes[axis] for axis in split)
            size = -(-length // self.num_beside)
            part, own = self._number(split, at) * length, self._number(self.beside, at)
            ends = (min(one * size, length) for one in (own, own + 1))
            found.append(np.arange(*(part + end for end in ends)))
        return found

    def _number(self, axes: tuple[str, ...], at: Mapping[str, int]) -> int:
        """Of a device along some mesh axes, the first of them the slowest."""
        number = 0
        for axis in axes:
            number = number * self.sizes[axis] + at[axis]
        return number

    def together(self, own: jax.Array, examples: int) -> jax.Array:
        """All of the part's examples, of what each device has for its own."""
        if self.num_beside == 1:
            return own
        with asked("table_batch_gather"):
            return lax.all_gather(own, self.beside, tiled=True)[:examples]


@dataclass(frozen=True, kw_only=True)
class LocalTables:
    """One device's part of the work.

    Args:
        stores: Of all tables.
        shares: How devices share the batch.
        optimizer: What updates rows.
        outputs: Name -> its features, in order.
    """

    stores: tuple[Store, ...]
    shares: Shares
    optimizer: TableOptimizer
    outputs: Mapping[str, tuple[str, ...]]

    def looked_up(
        self, state: Mapping[str, Arrays], batch: Arrays
    ) -> tuple[dict[str, jax.Array], dict[str, Unique]]:
        """Each output of this part of the batch, and what `updated` needs of it.

        Args:
            state: Store -> this device's part of its arrays.
            batch: Ids and weights of this part of the batch.
        """
        examples = len(next(iter(batch.values())))
        own = self._own(batch)
        vectors: dict[str, jax.Array] = {}
        kept = {}
        for store in self.stores:
            ids = unique(*positions(store, own), store.num_codes)
            rows = self._rows(store, state[store.name][ROWS], ids)
            at_position = rows.at[ids.slot].get(mode="fill", fill_value=0)
            vectors |= _pooled(store, own, at_position * ids.weight[:, None])
            kept[store.name] = jax.tree.map(lambda leaf: leaf[None], ids)
        found = {
            name: jnp.stack([vectors[feature] for feature in features], axis=1)
            for name, features in self.outputs.items()
        }
        together = {
            name: self.shares.together(array, examples) for name, array in found.items()
        }
        return together, kept

    def updated(
        self,
        state: Mapping[str, Arrays],
        kept: Mapping[str, Unique],
        gradients: Arrays,
        count: jax.Array,
        finite: jax.Array,
    ) -> dict[str, dict[str, jax.Array]]:
        """The arrays with the touched rows updated, in place where they are donated.

        Args:
            state: As of `looked_up`.
            kept: From there.
            gradients: Of its outputs.
            count: Updates done before.
            finite: Whether anything is to be updated.
        """
        own = {name: self.shares.own(array, 0) for name, array in gradients.items()}
        of_feature = {
            feature: own[name][:, at]
            for name, features in self.outputs.items()
            for at, feature in enumerate(features)
        }
        found = {}
        for store in self.stores:
            ids = jax.tree.map(lambda leaf: leaf[0], kept[store.name])
            sums = _of_codes(store, ids, of_feature)
            codes = jnp.where(finite, ids.codes, store.num_codes)
            ids = replace(ids, codes=codes)
            found[store.name] = self._updated(
                store, dict(state[store.name]), ids, sums, count
            )
        return found

    def _own(self, batch: Arrays) -> dict[str, jax.Array]:
        found = {}
        for name, array in batch.items():
            if jnp.issubdtype(array.dtype, jnp.integer):  # may be unsigned, or narrow
                found[name] = self.shares.own(array.astype(jnp.int32), ABSENT)
            else:
                found[name] = self.shares.own(array, 0)
        return found

    def _rows(self, store: Store, rows: jax.Array, ids: Unique) -> jax.Array:
        """(codes, dim): the row of each, zeros for none."""
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
        """All devices' gradients, this device's columns of them."""
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
        """The state with those local rows updated; rows may be there more than once."""
        rows, gradients = summed(rows, gradients, store.rows)
        taken = {
            name: array.at[rows].get(mode="fill", fill_value=0)
            for name, array in state.items()
        }
        # What is read of an array stays apart from what is written into it: fused, the
        # write would need a copy of the whole.
        taken, gradients = lax.optimization_barrier((taken, gradients))
        slots = {name: taken[name] for name in self.optimizer.slots}
        new, slots = self.optimizer.update(
            taken[ROWS],
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
        def of(gradients: jax.Array) -> jax.Array:
            total = jnp.sum(gradients * gradients, axis=1)
            if store.kind == "columns" and self.shares.mesh_axes:
                with asked("table_norms"):
                    total = lax.psum(total, self.shares.mesh_axes)
            return total / store.dim

        return of

    def _exchange(self, store: Store, ids: Unique) -> Exchange:
        examples = len(ids.slot) // store.lookups
        return Exchange.of(store, self.shares.mesh_axes, examples)


def _pooled(store: Store, batch: Arrays, weighted: jax.Array) -> dict[str, jax.Array]:
    """Feature -> (examples, dim): sums over its bags of weighted rows of positions."""
    found, at = {}, 0
    for feature, _ in store.features:
        shape = batch[feature].shape
        end = at + math.prod(shape)
        found[feature] = weighted[at:end].reshape(*shape, store.dim).sum(axis=1)
        at = end
    return found


def _of_codes(store: Store, ids: Unique, gradients: Arrays) -> jax.Array:
    """(codes, dim): the gradient of each code's row over this device's examples."""
    of_positions = jnp.concatenate(
        [
            jnp.repeat(gradients[feature], member.table.bag, axis=0)
            for feature, member in store.features
        ]
    )
    slot, weight = ids.slot[ids.order], ids.weight[ids.order]
    values = of_positions[ids.order] * weight[:, None]
    return summed_runs(values, slot, len(ids.codes))
