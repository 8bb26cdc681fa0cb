"""What a step with tables computes: global arrays in, global arrays out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.layout import BATCH_AXES, MESH_AXES
from meshpar.tables.initial import first_arrays
from meshpar.tables.lookup import LocalTables, Shares
from meshpar.tables.optimizers import array_structs
from meshpar.tables.stores import Store, stores_of
from meshpar.tables.tables import EmbeddingTables
from meshpar.train.state import TrainState
from meshpar.train.step_functions import Batch, Metrics, StepFunctions

TABLES = "embedding_tables"
"""Where in a state's `model_state` they are: store -> its arrays."""

Tables = dict[str, dict[str, Any]]
_BATCH, _WHOLE = PartitionSpec(BATCH_AXES), PartitionSpec()


@dataclass(frozen=True, kw_only=True)
class TableFunctions:
    """The functions of a step, tables included.

    Args:
        dense: Those of the model.
        tables: The tables.
    """

    dense: StepFunctions
    tables: EmbeddingTables

    @property
    def mesh(self) -> Any:
        """That of the model."""
        return self.dense.placement.mesh

    @cached_property
    def stores(self) -> tuple[Store, ...]:
        """What holds the tables."""
        return stores_of(self.tables.placements(self.mesh.size))

    @cached_property
    def shardings(self) -> TrainState:
        """The sharding of every array of the state."""
        of_tables = jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), self.specs
        )
        return joined(self.dense.shardings, of_tables)

    @cached_property
    def state_shapes(self) -> TrainState:
        """Shape and dtype of every array of the state."""
        return joined(self.dense.state_shapes, self._structs)

    @cached_property
    def specs(self) -> Tables:
        """How the tables' arrays lie."""
        axes = self.shares.mesh_axes
        return {
            store.name: {
                name: store.spec(axes, of_row=one.ndim == 1)
                for name, one in self._structs[store.name].items()
            }
            for store in self.stores
        }

    def born(self, seed: jax.Array) -> TrainState:
        """The first state, each device making its own part."""

        def local(seed: jax.Array) -> Tables:
            axes = self.shares.mesh_axes
            device = lax.axis_index(axes) if axes else 0
            return {
                store.name: first_arrays(store, self.tables.optimizer, seed, device)
                for store in self.stores
            }

        tables = self.on_shards(local, (_WHOLE,), self.specs)(seed)
        return joined(self.dense.born(seed), tables)

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The next state, and scalars.

        A step whose loss or gradients, those of what is looked up among them, are not
        finite leaves model and tables as they are.
        """
        dense, tables = parts(state)
        of_model, ids = self._split(batch)
        looked_up, kept = self._look_up(tables, ids)
        new, metrics, gradients = self.dense.update_and_inputs(
            dense, {**of_model, **looked_up}
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
        return joined(new, tables), metrics

    def evaluated(self, state: TrainState, batch: Batch) -> Any:
        """Summed loss and weights, without dropout and auxiliary losses."""
        return self.dense.evaluated(*self._dense_arguments(state, batch))

    def logits(self, state: TrainState, batch: Batch) -> Any:
        """What the model's `logits` gives."""
        return self.dense.logits(*self._dense_arguments(state, batch))

    def on_shards(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`local` of this device's part over all mesh axes."""
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
        dense, tables = parts(state)
        of_model, ids = self._split(batch)
        return dense, {**of_model, **self._look_up(tables, ids)[0]}

    def _look_up(self, tables: Tables, ids: Batch) -> tuple[dict[str, Any], Any]:
        look_up = self.on_shards(
            self._local.looked_up,
            (self.specs, _BATCH),
            (_BATCH, self._kept_spec),
        )
        return look_up(tables, ids)

    def _split(self, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's own arrays of a batch, and those of the tables."""
        names = self.tables.inputs
        of_model = {name: one for name, one in batch.items() if name not in names}
        return of_model, {name: one for name, one in batch.items() if name in names}

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
        """How the devices share a batch."""
        sizes = dict(self.mesh.shape)
        axes = tuple(axis for axis in MESH_AXES if sizes[axis] > 1)
        beside = tuple(axis for axis in axes if axis not in BATCH_AXES)
        return Shares(mesh_axes=axes, beside=beside, sizes=sizes)

    @property
    def _kept_spec(self) -> PartitionSpec:
        return PartitionSpec(self.shares.mesh_axes)


def joined(dense: TrainState, tables: Mapping[str, Any]) -> TrainState:
    """A model's state, or a tree like it, with the tables."""
    return replace(dense, model_state={**dense.model_state, TABLES: dict(tables)})


def parts(state: TrainState) -> tuple[TrainState, Tables]:
    """A model's own state, and the tables."""
    own = dict(state.model_state)
    tables = own.pop(TABLES)
    return replace(state, model_state=own), tables
