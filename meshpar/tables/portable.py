"""Tables without their placement: for checkpoints, and whole on the host.

In a checkpoint a table's arrays stand under its own name, row by row, padded with zeros
to a multiple of `BLOCK` rows and split by rows over all devices, with the number of its
rows. All-to-alls exchange a placement for such blocks and back, in every process alike.
Of n bytes that a device has of an array of a table it sends n (P - 1) / P, each of P
devices as much of a `table_wise` one as if it had the whole; somewhat more if the rows
of a block do not divide by P. A device needs room for its part of a store once more,
and for a `table_wise` table as often as the placement gave it room for one.

If the number of devices does not divide `BLOCK`, such as 6, one process must have them
all: its tables go through the host's memory, one store at a time, and lie on the most
devices that do divide, half of them or more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.errors import InputError
from meshpar.tables.exchange import sent
from meshpar.tables.optimizers import array_structs
from meshpar.tables.programs import TABLES, TableFunctions, split_state, with_arrays
from meshpar.tables.stores import COLUMNS, Member, Store
from meshpar.tables.table import Table
from meshpar.train.checkpoint.stored_arrays import opened, stored
from meshpar.train.layer_order import LayerOrder
from meshpar.train.state import TrainState

BLOCK = 4096
"""Rows come in multiples of this, which numbers of devices divide."""

NUM_ROWS = "num_rows"

Arrays = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class PortableTables:
    """Conversion of a step's state to tables without placement, and back.

    Args:
        functions: Functions of the step.
    """

    functions: TableFunctions

    def check_can_save(self) -> None:
        """Refuse devices of several processes that cannot share blocks of tables.

        Raises:
            InputError: Their number does not divide `BLOCK`.
        """
        if self.functions.mesh.is_multi_process and not self._divides:
            count = self.functions.mesh.size
            raise InputError(
                f"tables over {count} devices of several processes have no "
                f"checkpoints: that number does not divide {BLOCK}; take "
                f"{self._num_sharing} devices, or one process",
                key="checkpoint.indivisible_tables",
            )

    def check_stored(self, folder: Path) -> None:
        """Refuse a stored state of other tables.

        Args:
            folder: Folder of a state on the disk.

        Raises:
            InputError: A table has other rows there, or none at all.
        """
        arrays = stored(folder)
        for table in self.functions.tables.tables:
            array = arrays.get(f"model_state.{TABLES}.{table.name}.{NUM_ROWS}")
            if array is not None:
                num_rows = opened(folder, array.name).read().result()
                _check_rows(table, int(num_rows))
                continue
            if any(path.endswith(f".{NUM_ROWS}") for path in arrays):
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
        """Return the state with tables without placement.

        Raises:
            InputError: Other processes hold a part of the tables, and the number of
                devices does not divide `BLOCK`.
        """
        dense, arrays = split_state(state)
        whole = NamedSharding(self.functions.mesh, PartitionSpec())
        tables: Arrays = {}
        for table in self.functions.tables.tables:
            rows = np.asarray(table.rows, np.int32)
            tables[table.name] = {
                NUM_ROWS: jax.make_array_from_callback((), whole, rows.__getitem__)
            }
        if self._divides:
            for (store, name), (take_out, _) in self._programs.items():
                for table, array in take_out(arrays[store][name]).items():
                    tables[table][name] = array
        else:
            self._add_by_host(tables, arrays)
        return with_arrays(dense, tables)

    def put_in(self, state: TrainState) -> TrainState:
        """Return the state with tables in this placement; inverse of `taken_out`.

        Raises:
            InputError: A table has other rows.
        """
        dense, tables = split_state(state)
        for table in self.functions.tables.tables:
            _check_rows(table, int(tables[table.name][NUM_ROWS]))
        if not self._divides:
            return with_arrays(dense, self._from_host(tables))
        arrays: Arrays = {store.name: {} for store in self.functions.stores}
        for store in self.functions.stores:
            for name in self.functions.specs[store.name]:
                _, put_in = self._programs[store.name, name]
                names = [member.table.name for member in store.members]
                blocks = {table: tables[table][name] for table in names}
                arrays[store.name][name] = put_in(blocks)
        return with_arrays(dense, arrays)

    @cached_property
    def shapes(self) -> TrainState:
        """Shape and dtype of every array."""
        optimizer = self.functions.tables.optimizer
        num_rows = {NUM_ROWS: jax.ShapeDtypeStruct((), jnp.int32)}
        tables = {
            table.name: array_structs(optimizer, padded_rows(table.rows), table.dim)
            | num_rows
            for table in self.functions.tables.tables
        }
        return with_arrays(self.functions.dense.state_shapes, tables)

    @cached_property
    def shardings(self) -> TrainState:
        """Sharding of every array."""
        mesh = self.functions.mesh
        by_rows = NamedSharding(mesh, PartitionSpec(self.functions.shares.mesh_axes))
        if not self._divides:
            sharing = Mesh(mesh.devices.flat[: self._num_sharing], "rows")
            by_rows = NamedSharding(sharing, PartitionSpec("rows"))
        whole = NamedSharding(mesh, PartitionSpec())

        tables = jax.tree.map(
            lambda struct: by_rows if struct.shape else whole,
            self.shapes.model_state[TABLES],
        )
        return with_arrays(self.functions.dense.shardings, tables)

    @property
    def orders(self) -> TrainState:
        """Order of the layers in every array, for `Checkpoints`."""
        tables = jax.tree.map(lambda _: LayerOrder(), self.shapes.model_state[TABLES])
        return with_arrays(self.functions.dense.layer_orders, tables)

    @property
    def _divides(self) -> bool:
        return BLOCK % self.functions.mesh.size == 0

    @property
    def _num_sharing(self) -> int:
        """The most devices that can share blocks."""
        counts = range(1, self.functions.mesh.size + 1)
        return max(count for count in counts if BLOCK % count == 0)

    @cached_property
    def _programs(self) -> dict[tuple[str, str], tuple[Callable, Callable]]:
        """(store, array) -> program from the store to blocks of tables, and back."""
        mesh_axes, on_shards = self.functions.shares.mesh_axes, self.functions.on_shards
        programs: dict[tuple[str, str], tuple[Callable, Callable]] = {}
        for store in self.functions.stores:
            blocks = Blocks(store=store, mesh_axes=mesh_axes)
            names = [member.table.name for member in store.members]
            split = dict.fromkeys(names, PartitionSpec(mesh_axes))
            for name, spec in self.functions.specs[store.name].items():
                programs[store.name, name] = (
                    jax.jit(on_shards(blocks.taken_out, (spec,), split)),
                    jax.jit(on_shards(blocks.put_in, (split,), spec)),
                )
        return programs

    def _add_by_host(self, tables: Arrays, arrays: Arrays) -> None:
        """Add to `tables` the arrays of all stores, through the host's memory."""
        shardings = self.shardings.model_state[TABLES]
        for store in self.functions.stores:
            for table, whole in host_tables([store], arrays).items():
                for name, values in whole.items():
                    missing = padded_rows(len(values)) - len(values)
                    pads = [(0, missing), *[(0, 0)] * (values.ndim - 1)]
                    tables[table][name] = jax.device_put(
                        np.pad(values, pads), shardings[table][name]
                    )

    def _from_host(self, tables: Arrays) -> Arrays:
        shardings = self.functions.shardings.model_state[TABLES]
        arrays: Arrays = {}
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
            arrays |= stored_tables([store], whole, shardings)
        return arrays


def _check_rows(table: Table, num_rows: int) -> None:
    if num_rows != table.rows:
        raise InputError(
            f"table {table.name!r} has {num_rows} rows in the checkpoint, but rows="
            f"{table.rows} here; give it the rows that it was saved with",
            key="checkpoint.table_rows_mismatch",
        )


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Exchange of a device's part of a store's array for blocks of its tables.

    Block i has rows i * b to (i + 1) * b - 1 of a table, in whatever order a store has
    them.

    Args:
        store: The store.
        mesh_axes: Mesh axes over all devices.
    """

    store: Store
    mesh_axes: tuple[str, ...]

    def taken_out(self, part: jax.Array) -> dict[str, jax.Array]:
        """Return table -> this device's block of its rows, zeros for no row.

        Args:
            part: This device's part, (rows of the store, values of each) or one dim.
        """
        blocks = {}
        for member in self.store.members:
            block = self._exchanged(member, self._run(member, part))
            row = self._device * len(block) + jnp.arange(len(block))
            has_row = (row < member.table.rows).reshape(-1, *[1] * (block.ndim - 1))
            blocks[member.table.name] = jnp.where(has_row, block, 0)
        return blocks

    def put_in(self, blocks: Mapping[str, jax.Array]) -> jax.Array:
        """Return this device's part of the array; inverse of `taken_out`."""
        first = next(iter(blocks.values()))
        rest = (self.store.local_dim,) if first.ndim > 1 else ()
        part = jnp.zeros((self.store.rows, *rest), first.dtype)
        for member in self.store.members:
            run = self._run_from_block(member, blocks[member.table.name])
            at = slice(member.first, member.first + len(run))
            if member.device is not None:
                run = jnp.where(self._device == member.device, run, part[at])
            part = part.at[at].set(run)
        return part

    @property
    def _num_devices(self) -> int:
        return self.store.num_devices

    @property
    def _device(self) -> jax.Array | int:
        return lax.axis_index(self.mesh_axes) if self.mesh_axes else 0

    def _run(self, member: Member, part: jax.Array) -> jax.Array:
        """Return (rows, ...): the table's rows on this device, padded."""
        run = part[member.first : member.first + self.store.run_length(member)]
        size = padded_rows(member.table.rows)
        if self.store.is_cyclic(member):
            size = size // self._num_devices + 1  # A block's last row may be none.
        pads = [(0, size - len(run)), *[(0, 0)] * (run.ndim - 1)]
        return jnp.pad(run, pads)

    def _exchanged(self, member: Member, run: jax.Array) -> jax.Array:
        """Return this device's block, (rows of a block, ...), of all devices' runs."""
        rest = run.shape[1:]
        if self.store.is_cyclic(member):
            return self._cyclic_to_block(run)
        by_device = run.reshape(self._num_devices, -1, *rest)
        if member.device is not None:
            return self._sent(by_device)[member.device]
        if self.store.kind == COLUMNS and rest:
            columns_dbr = self._sent(by_device)
            return jnp.moveaxis(columns_dbr, 0, 1).reshape(-1, self.store.dim)
        return by_device[self._device]

    def _run_from_block(self, member: Member, block: jax.Array) -> jax.Array:
        """Return the table's rows on this device, given all devices' blocks."""
        rest, count = block.shape[1:], self._num_devices
        if self.store.is_cyclic(member):
            return self._block_to_cyclic(block)[: self.store.run_length(member)]
        if member.device is not None:
            holds = jnp.arange(count) == member.device
            holds = holds.reshape(count, *[1] * block.ndim)
            by_device = jnp.where(holds, block, 0)
        elif self.store.kind == COLUMNS and rest:
            by_device = jnp.moveaxis(block.reshape(len(block), count, -1), 1, 0)
        else:
            by_device = jnp.broadcast_to(block, (count, *block.shape))
        run = self._sent(by_device)
        run = run.reshape(-1, *run.shape[2:])
        return run[: self.store.run_length(member)]

    def _cyclic_to_block(self, run: jax.Array) -> jax.Array:
        """Return a block, of runs that have row r on device r mod `num_devices`.

        Blocks may not divide by that number: each device sends as many rows of its run
        as a block has at most of it, from the first that is in the block.
        """
        count = self._num_devices
        block = len(run) - 1
        most = -(-block // count)
        starts = self._first_rows(jnp.arange(count), self._device, block)
        by_device = jax.vmap(lambda at: lax.dynamic_slice_in_dim(run, at, most))(starts)
        # Row k of the block comes from device (first + k) mod count, its k // count-th.
        order = (self._device * block + jnp.arange(count)) % count
        in_order = self._sent(by_device)[order]
        return jnp.moveaxis(in_order, 0, 1).reshape(-1, *run.shape[1:])[:block]

    def _block_to_cyclic(self, block: jax.Array) -> jax.Array:
        """Return a cyclic run; inverse of `_cyclic_to_block`."""
        count, size = self._num_devices, len(block)
        most = -(-size // count)
        pads = [(0, most * count - size), *[(0, 0)] * (block.ndim - 1)]
        in_order = jnp.pad(block, pads).reshape(most, count, *block.shape[1:])
        order = (jnp.arange(count) - self._device * size) % count
        by_device = self._sent(jnp.moveaxis(in_order, 1, 0)[order])

        def written(sender: jax.Array, run: jax.Array) -> jax.Array:
            # In order: the next block's first rows replace what this one lacks.
            at = self._first_rows(sender, self._device, size)
            return lax.dynamic_update_slice_in_dim(run, by_device[sender], at, 0)

        run = jnp.zeros((size + 1, *block.shape[1:]), block.dtype)
        return lax.fori_loop(0, count, written, run)

    def _first_rows(
        self, block: jax.Array, device: jax.Array | int, size: int
    ) -> jax.Array:
        """Return where in a device's run the first row of a block is."""
        return (block * size - device + self._num_devices - 1) // self._num_devices

    def _sent(self, by_device: jax.Array) -> jax.Array:
        """Send part `i` to device `i`; return all devices' parts for this one."""
        return sent(by_device, self.mesh_axes, "table_rows")


def padded_rows(rows: int) -> int:
    """Return the rows of a table, padded to a multiple of `BLOCK`.

    Example:
        >>> padded_rows(5000)
        8192
    """
    return math.ceil(rows / BLOCK) * BLOCK


def host_tables(
    stores: Sequence[Store], arrays: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, np.ndarray]]:
    """Return table -> its arrays on the host, row by row.

    Args:
        stores: Stores that hold the tables.
        arrays: Store -> its arrays, all on devices of this process.

    Raises:
        InputError: Other processes hold a part of them.
    """
    tables = {}
    for store in stores:
        whole = {name: _fetched(array) for name, array in arrays[store.name].items()}
        for member in store.members:
            places = store.codes(member, np.arange(member.table.rows))
            tables[member.table.name] = {
                name: array[places] for name, array in whole.items()
            }
    return tables


def stored_tables(
    stores: Sequence[Store],
    tables: Mapping[str, Mapping[str, np.ndarray]],
    shardings: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, jax.Array]]:
    """Return the stores' arrays on their devices; inverse of `host_tables`.

    Raises:
        InputError: A table is missing, or has another shape.
    """
    arrays: dict[str, dict[str, jax.Array]] = {}
    for store in stores:
        arrays[store.name] = {}
        for name, sharding in shardings[store.name].items():
            first = tables[store.members[0].table.name][name]
            whole = np.zeros((store.num_codes, *first.shape[1:]), np.float32)
            for member in store.members:
                values, shape = tables[member.table.name][name], whole.shape[1:]
                if values.shape != (member.table.rows, *shape):
                    raise InputError(
                        f"table {member.table.name!r} is given as {values.shape}, but "
                        f"is {(member.table.rows, *shape)}; give it with the rows and "
                        "dim that it was made with",
                        key="tables.wrong_shape",
                    )
                places = store.codes(member, np.arange(member.table.rows))
                whole[places] = values
            arrays[store.name][name] = jax.device_put(whole, sharding)
    return arrays


def _fetched(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise InputError(
            "other processes hold a part of the tables; fetch them where one process "
            "has all devices",
            key="tables.held_by_other_processes",
        )
    return np.asarray(array)
