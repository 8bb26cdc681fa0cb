"""First values of tables: a function of seed, table, row and column, and no layout's.

    value = scale * (2 * u - 1),   u uniform from 0 to 1 by Threefry-2x32 (Salmon et al.
    2011), keyed by the seed, of the counters (row, table's place * 65536 + column)

so that each device draws its own part, and any placement has the same values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32

from meshpar.tables.optimizers import ROWS, TableOptimizer, array_structs
from meshpar.tables.stores import Member, Store

_SALT = 0x7AB1E
"""Tells the tables' key from those of the model's parameters."""

_BLOCK_VALUES = 2**22
"""Drawn at once; 64 MB of temporary memory."""


def first_arrays(
    store: Store,
    optimizer: TableOptimizer,
    seed: jax.Array,
    device: jax.Array | int,
) -> dict[str, jax.Array]:
    """This device's part of a store: its rows, and their optimizer state.

    Args:
        store: It.
        optimizer: What has state of each row.
        seed: Of the run, a uint32 scalar.
        device: This one's number along all mesh axes.
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
    """The store's rows with a table's run drawn, where this device has it."""
    length = store.run_length(member)
    columns = jnp.arange(store.local_dim)
    if store.kind == "columns":
        columns = columns + device * store.local_dim
    block = max(1, min(length, _BLOCK_VALUES // store.local_dim))
    num_blocks = -(-length // block)
    here = True if member.device is None else device == member.device

    def draw(at: jax.Array, rows: jax.Array) -> jax.Array:
        # The last block begins earlier, where the rows do not divide.
        first = jnp.minimum(at * block, length - block)
        of_block = store.rows_at(member, device, first + jnp.arange(block))
        drawn = values(member, seed, of_block, columns)
        start = member.first + first
        old = lax.dynamic_slice_in_dim(rows, start, block)
        return lax.dynamic_update_slice_in_dim(
            rows, jnp.where(here, drawn, old), start, 0
        )

    return lax.fori_loop(0, num_blocks, draw, rows)


def values(
    member: Member, seed: jax.Array, rows: jax.Array, columns: jax.Array
) -> jax.Array:
    """fp32 (rows, columns): first values of those; zeros of rows past the table's."""
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
    drawn = member.table.first_values_within * (2 * uniform - 1)
    exists = rows < member.table.rows
    return jnp.where(exists[:, None], drawn.reshape(shape), 0.0)
