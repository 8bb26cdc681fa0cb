"""States with tables as any placement, and any number of devices, can take them up.

A table's arrays stand under its own name, row by row. They go through the host's
memory, one store at a time, so that a host needs room for its largest store.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.tables.host import host_tables, stored_tables
from meshpar.tables.programs import TABLES, TableFunctions, joined, parts
from meshpar.train.layer_order import LayerOrder
from meshpar.train.state import TrainState


def portable(functions: TableFunctions, state: TrainState) -> TrainState:
    """A state whose tables are of no placement.

    Raises:
        InputError: Other processes hold a part of the tables.
    """
    dense, arrays = parts(state)
    whole = host_tables(functions.stores, arrays)
    shardings = portable_shardings(functions).model_state[TABLES]
    return joined(dense, jax.tree.map(jax.device_put, whole, shardings))


def stored(functions: TableFunctions, state: TrainState) -> TrainState:
    """Undoes `portable`, for the placement and the devices of these functions.

    Raises:
        InputError: A table has other rows or another dim.
    """
    dense, tables = parts(state)
    whole = jax.device_get(tables)
    shardings = functions.shardings.model_state[TABLES]
    return joined(dense, stored_tables(functions.stores, whole, shardings))


def portable_shapes(functions: TableFunctions) -> TrainState:
    """Shape and dtype of every array of a portable state."""
    slots = functions.tables.optimizer.slots
    found: dict[str, Any] = {}
    for table in functions.tables.tables:
        shapes = {"rows": (table.rows, table.dim)} | {
            name: (table.rows,) if slot.of_row else (table.rows, table.dim)
            for name, slot in slots.items()
        }
        found[table.name] = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32)
            for name, shape in shapes.items()
        }
    return joined(functions.dense.state_shapes, found)


def portable_shardings(functions: TableFunctions) -> TrainState:
    """The sharding of each: by rows over all devices, where they divide."""
    mesh = functions.mesh
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1)

    def sharding(shape: jax.ShapeDtypeStruct) -> NamedSharding:
        divides = axes and shape.shape[0] % mesh.size == 0
        return NamedSharding(mesh, PartitionSpec(axes) if divides else PartitionSpec())

    of_tables = jax.tree.map(sharding, portable_shapes(functions).model_state[TABLES])
    return joined(functions.dense.shardings, of_tables)


def portable_orders(functions: TableFunctions) -> TrainState:
    """Where the layers of every array lie, as `Checkpoints` takes it."""
    of_tables = jax.tree.map(
        lambda _: LayerOrder(), portable_shapes(functions).model_state[TABLES]
    )
    return joined(functions.dense.layer_orders, of_tables)
