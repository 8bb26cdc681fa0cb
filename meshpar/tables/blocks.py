"""Blocks of a table's rows, one a device, out of any placement and back, by all-to-all.

Block i has row i * b and the b - 1 next ones, wherever a store has them; rows are
filled up with zeros to a multiple of `BLOCK`, whatever a store has there. Of n bytes
that a device has of an array of a table it sends n (P - 1) / P, each of P devices as
much of a `table_wise` one as if it had the whole; somewhat more where the rows of a
block do not divide by P.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.tables.exchange import sent
from meshpar.tables.stores import COLUMNS, SPREAD, Member, Store

BLOCK = 4096
"""Rows come in multiples of this, which numbers of devices divide."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """One array of a store, as one device exchanges its part for blocks of tables.

    Args:
        store: It.
        mesh_axes: Of all devices.
    """

    store: Store
    mesh_axes: tuple[str, ...]

    def taken_out(self, part: jax.Array) -> dict[str, jax.Array]:
        """Table -> this device's block of its rows.

        Args:
            part: Of the array: (rows of the store, values of each), or one dim.
        """
        return {
            member.table.name: self._block(member, self._run(member, part))
            for member in self.store.members
        }

    def _block(self, member: Member, run: jax.Array) -> jax.Array:
        """This device's block, zeros where the table has no row."""
        block = self._exchanged(member, run)
        row = self._device * len(block) + jnp.arange(len(block))
        has_row = (row < member.table.rows).reshape(-1, *[1] * (block.ndim - 1))
        return jnp.where(has_row, block, 0)

    def put_in(self, blocks: Mapping[str, jax.Array]) -> jax.Array:
        """Undoes `taken_out`."""
        first = next(iter(blocks.values()))
        rest = (self.store.local_dim,) if first.ndim > 1 else ()
        part = jnp.zeros((self.store.rows, *rest), first.dtype)
        for member in self.store.members:
            run = self._run_of(member, blocks[member.table.name])
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

    def _is_cyclic(self, member: Member) -> bool:
        """Whether row r lies on device r mod the number of devices."""
        return self.store.kind == SPREAD and member.device is None

    def _run(self, member: Member, part: jax.Array) -> jax.Array:
        """(rows, ...): the table's rows on this device, filled up."""
        run = part[member.first : member.first + self.store.run_length(member)]
        size = filled(member.table.rows)
        if self._is_cyclic(member):
            size = size // self._num_devices + 1  # A block's last row may be none.
        pads = [(0, size - len(run)), *[(0, 0)] * (run.ndim - 1)]
        return jnp.pad(run, pads)

    def _exchanged(self, member: Member, run: jax.Array) -> jax.Array:
        """(rows of a block, ...): this device's, of the runs of all."""
        rest = run.shape[1:]
        if self._is_cyclic(member):
            return self._block_of_cyclic(run)
        by_device = run.reshape(self._num_devices, -1, *rest)
        if member.device is not None:
            return self._sent(by_device)[member.device]
        if self.store.kind == COLUMNS and rest:
            columns_dbr = self._sent(by_device)
            return jnp.moveaxis(columns_dbr, 0, 1).reshape(-1, self.store.dim)
        return by_device[self._device]

    def _run_of(self, member: Member, block: jax.Array) -> jax.Array:
        """Undoes `_run` and `_block`."""
        rest, count = block.shape[1:], self._num_devices
        if self._is_cyclic(member):
            return self._cyclic_of_block(block)[: self.store.run_length(member)]
        if member.device is not None:
            is_it = jnp.arange(count) == member.device
            is_it = is_it.reshape(count, *[1] * block.ndim)
            by_device = jnp.where(is_it, block, 0)
        elif self.store.kind == COLUMNS and rest:
            by_device = jnp.moveaxis(block.reshape(len(block), count, -1), 1, 0)
        else:
            by_device = jnp.broadcast_to(block, (count, *block.shape))
        run = self._sent(by_device)
        run = run.reshape(-1, *run.shape[2:])
        return run[: self.store.run_length(member)]

    def _block_of_cyclic(self, run: jax.Array) -> jax.Array:
        """A block, of runs that have row r on device r mod the devices' number.

        Blocks need not divide by that number: each device sends as many rows of its run
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

    def _cyclic_of_block(self, block: jax.Array) -> jax.Array:
        """Undoes `_block_of_cyclic`."""
        count, size = self._num_devices, len(block)
        most = -(-size // count)
        pads = [(0, most * count - size), *[(0, 0)] * (block.ndim - 1)]
        in_order = jnp.pad(block, pads).reshape(most, count, *block.shape[1:])
        order = (jnp.arange(count) - self._device * size) % count
        by_device = self._sent(jnp.moveaxis(in_order, 1, 0)[order])

        def written(sender: jax.Array, run: jax.Array) -> jax.Array:
            # In order: what a block lacks at its end the next one's first row replaces.
            at = self._first_rows(sender, self._device, size)
            return lax.dynamic_update_slice_in_dim(run, by_device[sender], at, 0)

        run = jnp.zeros((size + 1, *block.shape[1:]), block.dtype)
        return lax.fori_loop(0, count, written, run)

    def _first_rows(
        self, block: jax.Array, device: jax.Array | int, size: int
    ) -> jax.Array:
        """Where in a device's run the first row is that a block has of it."""
        return (block * size - device + self._num_devices - 1) // self._num_devices

    def _sent(self, by_device: jax.Array) -> jax.Array:
        """Part `i` to device `i`; the parts of all devices for this one."""
        return sent(by_device, self.mesh_axes, "table_rows")


def divides(num_devices: int) -> bool:
    """Whether so many devices can share any table's blocks."""
    return BLOCK % num_devices == 0


def filled(rows: int) -> int:
    """Rows of a table with the zeros that fill it up.

    Example:
        >>> filled(5000)
        8192
    """
    return math.ceil(rows / BLOCK) * BLOCK
