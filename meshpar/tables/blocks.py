"""Blocks of a table's rows, one a device, out of any placement and back, by all-to-all.

Block i has row i * b and the b - 1 next ones, wherever a store has them; rows are
filled up with zeros to a multiple of `BLOCK`. Of n bytes that a device has of an array
of a table it sends n (P - 1) / P, each of P devices as much of a `table_wise` one as if
it had the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked
from meshpar.tables.stores import COLUMNS, SPREAD, Member, Store

BLOCK = 4096
"""Rows come in multiples of this, the square of as many devices as divide it."""


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
            size //= self._num_devices
        pads = [(0, size - len(run)), *[(0, 0)] * (run.ndim - 1)]
        return jnp.pad(run, pads)

    def _block(self, member: Member, run: jax.Array) -> jax.Array:
        """(rows of a block, ...): this device's, of the runs of all."""
        rest = run.shape[1:]
        by_device = run.reshape(self._num_devices, -1, *rest)
        if self._is_cyclic(member):
            return jnp.moveaxis(self._sent(by_device), 0, 1).reshape(-1, *rest)
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
            by_device = jnp.moveaxis(block.reshape(-1, count, *rest), 1, 0)
        elif member.device is not None:
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

    def _sent(self, by_device: jax.Array) -> jax.Array:
        """Part `i` to device `i`; the parts of all devices for this one."""
        if not self.mesh_axes:
            return by_device
        with asked("table_rows"):
            return lax.all_to_all(by_device, self.mesh_axes, 0, 0, tiled=True)


def filled(rows: int) -> int:
    """Rows of a table with the zeros that fill it up.

    Example:
        >>> filled(5000)
        8192
    """
    return math.ceil(rows / BLOCK) * BLOCK
