"""States with tables as any placement, and any number of devices, can take them up.

A table's arrays stand under its own name, row by row, filled up with zeros to a
multiple of `BLOCK` rows and split by rows over all devices; beside them stands how many
rows it has. All-to-alls take them there and back, in every process alike: a device
needs room for its part of a store once more, and for a `table_wise` table as often as
the placement gave it room for that. Numbers of devices that do not divide `BLOCK`, such
as 6, are for one process alone: there tables go through the host's memory, one store at
a time, and lie on as many of the devices as divide, half of them or more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.errors import InputError
from meshpar.tables.blocks import BLOCK, Blocks, divides, filled
from meshpar.tables.host import host_tables, stored_tables
from meshpar.tables.optimizers import array_structs
from meshpar.tables.programs import TABLES, TableFunctions, joined, parts
from meshpar.tables.stores import Store
from meshpar.tables.table import Table
from meshpar.train.layer_order import LayerOrder
from meshpar.train.state import TrainState
from meshpar.train.stored_arrays import opened, stored

NUM_ROWS = "num_rows"

Arrays = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class PortableTables:
    """Takes a step's tables out of their placement, and puts them into it.

    Args:
        functions: Of the step.
    """

    functions: TableFunctions

    def check_can_save(self) -> None:
        """Refuses devices of several processes that cannot share blocks of tables.

        Raises:
            InputError: Their number does not divide `BLOCK`.
        """
        if self.functions.mesh.is_multi_process and not self._divides:
            raise InputError(
                f"tables over {self._num_devices} devices of several processes have no "
                f"checkpoints: that number does not divide {BLOCK}; take "
                f"{self._num_sharing} devices, or one process",
                key="checkpoint.indivisible_tables",
            )

    def check_stored(self, folder: Path) -> None:
        """Refuses what was saved of other tables.

        Args:
            folder: Of a state on the disk.

        Raises:
            InputError: A table has other rows there, or none at all.
        """
        there = stored(folder)
        for table in self.functions.tables.tables:
            name = there.get(f"model_state.{TABLES}.{table.name}.{NUM_ROWS}")
            if name is not None:
                num_rows = opened(folder, name.name).read().result()
                _check_rows(table, int(num_rows))
                continue
            if any(path.endswith(f".{NUM_ROWS}") for path in there):
                raise InputError(
                    f"the checkpoint has no table {table.name!r}; give the tables that "
                    "it was saved with",
                    key="checkpoint.missing_table",
                )
            raise InputError(
                "the checkpoint has no tables, or was written by an earlier version, "
                "which kept them as they were placed; go on with that version, or "
                "start without resuming",
                key="checkpoint.no_tables",
            )

    def taken_out(self, state: TrainState) -> TrainState:
        """A state whose tables are of no placement.

        Raises:
            InputError: Other processes hold a part of the tables, and the devices'
                number does not divide.
        """
        dense, arrays = parts(state)
        if not self._divides:
            return joined(dense, self._by_host(arrays))
        found = self._num_rows()
        for (store, name), (take_out, _) in self._programs.items():
            for table, array in take_out(arrays[store][name]).items():
                found[table][name] = array
        return joined(dense, found)

    def put_in(self, state: TrainState) -> TrainState:
        """Undoes `taken_out`, for this placement and these devices.

        Raises:
            InputError: A table has other rows.
        """
        dense, tables = parts(state)
        for table in self.functions.tables.tables:
            _check_rows(table, int(tables[table.name][NUM_ROWS]))
        if not self._divides:
            return joined(dense, self._from_host(tables))
        found: Arrays = {store.name: {} for store in self.functions.stores}
        for (store, name), (_, put_in) in self._programs.items():
            members = self._stores[store].members
            given = {one.table.name: tables[one.table.name][name] for one in members}
            found[store][name] = put_in(given)
        return joined(dense, found)

    @cached_property
    def shapes(self) -> TrainState:
        """Shape and dtype of every array."""
        optimizer = self.functions.tables.optimizer
        num_rows = {NUM_ROWS: jax.ShapeDtypeStruct((), jnp.int32)}
        of_tables = {
            table.name: array_structs(optimizer, filled(table.rows), table.dim)
            | num_rows
            for table in self.functions.tables.tables
        }
        return joined(self.functions.dense.state_shapes, of_tables)

    @cached_property
    def shardings(self) -> TrainState:
        """The sharding of each."""
        mesh = self.functions.mesh
        by_rows = NamedSharding(mesh, PartitionSpec(self._mesh_axes))
        if not self._divides:
            some = Mesh(mesh.devices.flat[: self._num_sharing], "rows")
            by_rows = NamedSharding(some, PartitionSpec("rows"))
        whole = NamedSharding(mesh, PartitionSpec())

        def sharding(shape: jax.ShapeDtypeStruct) -> NamedSharding:
            return by_rows if shape.shape else whole

        of_tables = jax.tree.map(sharding, self.shapes.model_state[TABLES])
        return joined(self.functions.dense.shardings, of_tables)

    @property
    def orders(self) -> TrainState:
        """Where the layers of every array lie, as `Checkpoints` takes it."""
        of_tables = self.shapes.model_state[TABLES]
        return joined(
            self.functions.dense.layer_orders,
            jax.tree.map(lambda _: LayerOrder(), of_tables),
        )

    @property
    def _mesh_axes(self) -> tuple[str, ...]:
        return self.functions.shares.mesh_axes

    @property
    def _num_devices(self) -> int:
        return self.functions.mesh.size

    @property
    def _divides(self) -> bool:
        return divides(self._num_devices)

    @property
    def _num_sharing(self) -> int:
        """The most devices that can share blocks."""
        return max(filter(divides, range(1, self._num_devices + 1)))

    @cached_property
    def _stores(self) -> dict[str, Store]:
        return {store.name: store for store in self.functions.stores}

    @cached_property
    def _programs(self) -> dict[tuple[str, str], tuple[Callable, Callable]]:
        """(store, array) -> what takes the tables out of it, and what puts them in."""
        found = {}
        for store in self.functions.stores:
            for name, spec in self.functions.specs[store.name].items():
                blocks = Blocks(store=store, mesh_axes=self._mesh_axes)
                split = {
                    member.table.name: PartitionSpec(self._mesh_axes)
                    for member in store.members
                }
                found[store.name, name] = (
                    self._on_shards(blocks.taken_out, spec, split),
                    self._on_shards(blocks.put_in, split, spec),
                )
        return found

    def _on_shards(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.jit(self.functions.on_shards(local, (in_specs,), out_specs))

    def _num_rows(self) -> Arrays:
        whole = NamedSharding(self.functions.mesh, PartitionSpec())
        found: Arrays = {}
        for table in self.functions.tables.tables:
            rows = np.asarray(table.rows, np.int32)
            found[table.name] = {
                NUM_ROWS: jax.make_array_from_callback((), whole, rows.__getitem__)
            }
        return found

    def _by_host(self, arrays: Arrays) -> Arrays:
        found = self._num_rows()
        shardings = self.shardings.model_state[TABLES]
        for store in self.functions.stores:
            for table, of_table in host_tables([store], arrays).items():
                for name, values in of_table.items():
                    missing = filled(len(values)) - len(values)
                    pads = [(0, missing), *[(0, 0)] * (values.ndim - 1)]
                    found[table][name] = jax.device_put(
                        np.pad(values, pads), shardings[table][name]
                    )
        return found

    def _from_host(self, tables: Arrays) -> Arrays:
        shardings = self.functions.shardings.model_state[TABLES]
        found: Arrays = {}
        for store in self.functions.stores:
            whole = {
                member.table.name: {
                    name: np.asarray(tables[member.table.name][name])[
                        : member.table.rows
                    ]
                    for name in shardings[store.name]
                }
                for member in store.members
            }
            found |= stored_tables([store], whole, shardings)
        return found


def _check_rows(table: Table, there: int) -> None:
    if there != table.rows:
        raise InputError(
            f"table {table.name!r} has {there} rows in the checkpoint, but rows="
            f"{table.rows} here; give it the rows that it was saved with",
            key="checkpoint.table_rows_mismatch",
        )
