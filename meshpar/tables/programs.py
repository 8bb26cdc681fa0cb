"""Functions of a step with tables: global arrays in, global arrays out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.layout import BATCH_AXES, MESH_AXES
from meshpar.tables.exchange import positions
from meshpar.tables.lookup import LocalTables, Shares, first_arrays
from meshpar.tables.optimizers import array_structs
from meshpar.tables.stores import COLUMNS, SPREAD, Store
from meshpar.tables.tables import EmbeddingTables
from meshpar.train.state import TrainState
from meshpar.train.step_functions import Batch, Metrics, StepFunctions

TABLES = "embedding_tables"
"""Key in a state's `model_state` of the tables: store -> its arrays."""

Tables = dict[str, dict[str, Any]]
_BATCH, _WHOLE = PartitionSpec(BATCH_AXES), PartitionSpec()


@dataclass(frozen=True, kw_only=True)
class TableFunctions:
    """The functions of a step, tables included.

    Args:
        dense: Functions of the model's step.
        tables: The tables.
    """

    dense: StepFunctions
    tables: EmbeddingTables

    @property
    def mesh(self) -> Any:
        """Mesh of the model."""
        return self.dense.placement.mesh

    @cached_property
    def stores(self) -> tuple[Store, ...]:
        """Stores that hold the tables."""
        return self.tables.placements(self.mesh.size).stores

    @cached_property
    def shardings(self) -> TrainState:
        """Sharding of every array of the state."""
        tables = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs)
        return with_arrays(self.dense.shardings, tables)

    @cached_property
    def state_shapes(self) -> TrainState:
        """Shape and dtype of every array of the state."""
        return with_arrays(self.dense.state_shapes, self._structs)

    @cached_property
    def specs(self) -> Tables:
        """Spec of each array of the tables."""
        axes = self.shares.mesh_axes
        return {
            store.name: {
                name: store.spec(axes, per_row=one.ndim == 1)
                for name, one in self._structs[store.name].items()
            }
            for store in self.stores
        }

    def initial_state(self, seed: jax.Array) -> TrainState:
        """Return the first state, each device making its own part."""

        def local(seed: jax.Array) -> Tables:
            axes = self.shares.mesh_axes
            device = lax.axis_index(axes) if axes else 0
            return {
                store.name: first_arrays(store, self.tables.optimizer, seed, device)
                for store in self.stores
            }

        tables = self.on_shards(local, (_WHOLE,), self.specs)(seed)
        return with_arrays(self.dense.initial_state(seed), tables)

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Return the next state, and scalars.

        If the loss, a gradient, or the gradient of a vector that was looked up is not
        finite, model and tables do not change.
        """
        dense, tables = split_state(state)
        own, ids = self._split(batch)
        looked_up, kept = self._look_up(tables, ids)
        new, metrics, gradients = self.dense.update_and_inputs(
            dense, {**own, **looked_up}
        )
        updated = self.on_shards(
            self._local.updated,
            (self.specs, self._kept_spec, _BATCH, _WHOLE, _WHOLE),
            self.specs,
        )
        tables = updated(
            tables,
            kept,
            {name: gradients[name] for name in looked_up},
            dense.step - dense.skipped,
            new.skipped == dense.skipped,
        )
        return with_arrays(new, tables), metrics

    def evaluated(self, state: TrainState, batch: Batch) -> Any:
        """Return summed loss and weights, without dropout and auxiliary losses."""
        return self.dense.evaluated(*self._dense_arguments(state, batch))

    def logits(self, state: TrainState, batch: Batch) -> Any:
        """Return the model's `logits`."""
        return self.dense.logits(*self._dense_arguments(state, batch))

    def on_shards(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Return `jax.shard_map` of `local` over all mesh axes."""
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    @property
    def _structs(self) -> Tables:
        optimizer = self.tables.optimizer
        return {
            store.name: array_structs(optimizer, *store.shape) for store in self.stores
        }

    def _dense_arguments(
        self, state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, Any]]:
        dense, tables = split_state(state)
        own, ids = self._split(batch)
        return dense, {**own, **self._look_up(tables, ids)[0]}

    def _look_up(self, tables: Tables, ids: Batch) -> tuple[dict[str, Any], Any]:
        look_up = self.on_shards(
            self._local.looked_up,
            (self.specs, _BATCH),
            (_BATCH, self._kept_spec),
        )
        return look_up(tables, ids)

    def _split(self, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the model's own arrays of a batch, and those of the tables."""
        names = self.tables.inputs
        own = {name: one for name, one in batch.items() if name not in names}
        return own, {name: one for name, one in batch.items() if name in names}

    @cached_property
    def _local(self) -> LocalTables:
        return LocalTables(
            stores=self.stores,
            shares=self.shares,
            optimizer=self.tables.optimizer,
            outputs=self.tables.outputs,
        )

    @cached_property
    def shares(self) -> Shares:
        """Shares of a batch among the devices."""
        sizes = dict(self.mesh.shape)
        axes = tuple(axis for axis in MESH_AXES if sizes[axis] > 1)
        replicas = tuple(axis for axis in axes if axis not in BATCH_AXES)
        return Shares(mesh_axes=axes, replica_axes=replicas, sizes=sizes)

    @property
    def _kept_spec(self) -> PartitionSpec:
        return PartitionSpec(self.shares.mesh_axes)


def with_arrays(dense: TrainState, tables: Mapping[str, Any]) -> TrainState:
    """Return a model's state, or a tree like it, with the tables' arrays."""
    return replace(dense, model_state={**dense.model_state, TABLES: dict(tables)})


def split_state(state: TrainState) -> tuple[TrainState, Tables]:
    """Return a model's own state, and the tables' arrays."""
    own = dict(state.model_state)
    tables = own.pop(TABLES)
    return replace(state, model_state=own), tables


def rows_looked_up(
    stores: Sequence[Store], shares: Shares, batch: Mapping[str, Any]
) -> np.ndarray:
    """Return the rows that each device looks up for a batch, (devices,).

    In each share of the examples every id counts once. A device looks up a part of each
    row of a store that is split by columns, which counts as that part.

    Args:
        stores: Stores that hold the tables.
        shares: Shares of the batch.
        batch: Ids of the global batch, on the host.
    """
    num_devices = stores[0].num_devices
    counts = np.zeros(num_devices)
    for store in stores:
        codes = _codes(store, batch)
        for device, at in enumerate(shares.device_examples(len(codes))):
            local = codes[at]
            distinct = np.unique(local[local < store.num_codes])
            if store.kind == SPREAD:
                counts += np.bincount(distinct // store.rows, minlength=num_devices)
            elif store.kind == COLUMNS:
                counts += len(distinct) / num_devices
            else:
                counts[device] += len(distinct)
    return counts


def _codes(store: Store, batch: Mapping[str, Any]) -> np.ndarray:
    """Return the codes of a batch, (examples, ids of a store's features)."""
    codes, _ = positions(store, batch)
    shapes = [np.shape(batch[feature]) for feature, _ in store.features]
    ends = np.cumsum([examples * bag for examples, bag in shapes])[:-1]
    parts = np.split(np.asarray(codes), ends)
    pairs = zip(parts, shapes, strict=True)
    return np.concatenate([part.reshape(shape) for part, shape in pairs], axis=1)
