"""Operations on whole matrices, each computed by the device that owns it.

Every device holds a shard of a matrix. The shards go to the matrix's owner
(`meshpar.parallel.owners`), which computes with the whole and sends the shards of the
result back. Of a matrix of `P` values on `n` devices P (n-1)/n go each way. Where
several devices hold the same shard, only those around the owner send theirs; one
all-gather then brings each the results that others own.
Reference: Liu et al. 2025, Muon is Scalable for LLM Training, section 2.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshpar.collectives import asked, running_times
from meshpar.hardware.platforms import platform_named
from meshpar.parallel.matrices import OnMatrices, from_matrix_rows, matrix_rows
from meshpar.parallel.owners import (
    Assignment,
    Group,
    Operand,
    Packing,
    assign_owners,
    packing,
)
from meshpar.parallel.placement import Placement
from meshpar.parallel.tensor import shard_index
from meshpar.rules.sharding import path_name


@dataclass(frozen=True, kw_only=True)
class Owners:
    """The devices of a mesh as owners of matrices that lie as optimizer states.

    Args:
        mesh: The mesh.
        specs: How each parameter's optimizer state lies, by path.
        filled: For each parameter with layers, whether each place holds one, by path.
        has_ragged: Whether the compiler has `ragged_all_to_all`, which sends the shards
            and no more. Where it has none, every device is sent as many matrices of a
            shape as the one that owns the most.
        replica_axes: Mesh axes along which each device trains its own replica.
    """

    mesh: Mesh | AbstractMesh
    specs: Mapping[str, PartitionSpec]
    filled: Mapping[str, tuple[bool, ...]]
    has_ragged: bool
    replica_axes: tuple[str, ...] = ()

    @classmethod
    def from_placement(
        cls, placement: Placement, replica_axes: tuple[str, ...] = ()
    ) -> Owners:
        """Return the owners of a model's matrices."""
        leaves = jax.tree.leaves_with_path(placement.stored)
        parameters = placement.model.flat_parameters()
        return cls(
            mesh=placement.mesh,
            specs={path_name(path): stored.spec for path, stored in leaves},
            filled={
                path: tuple(place >= 0 for place in one.places)
                for path, one in parameters.items()
                if one.num_layers is not None
            },
            # JAX maps no ragged_all_to_all over replicas whose sizes are in common.
            has_ragged=platform_named(placement.platform).has_ragged_all_to_all
            and not replica_axes,
            replica_axes=replica_axes,
        )

    def assignment(
        self, paths: Sequence[str], operations: Sequence[OnMatrices], shapes: Any
    ) -> Assignment:
        """Return who owns which matrix of arrays of these parameters."""
        operands = [
            Operand(operation, tuple(shape), self.specs[path], self.filled.get(path))
            for path, operation, shape in zip(paths, operations, shapes, strict=True)
        ]
        sizes = self.mesh.shape.items()
        grid = {axis: n for axis, n in sizes if axis not in self.replica_axes}
        return assign_owners(operands, grid)

    def run(
        self,
        paths: Sequence[str],
        operations: Sequence[OnMatrices],
        arrays: Sequence[jax.Array],
        shared: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Return the results of operations, each laid out as its parameter's state.

        It communicates as the module says: two all-to-alls for each shape of matrices
        that devices split, one all-gather for each that several have copies of.

        Args:
            paths: Path of each array's parameter.
            operations: Operation on each array, of one layer.
            arrays: Global arrays.
            shared: Arrays that every operation takes beside its matrix.
        """
        shapes = [array.shape for array in arrays]
        assignment = self.assignment(paths, operations, shapes)
        exchanges = [
            Exchange(assignment, group, self.has_ragged) for group in assignment.groups
        ]
        batch_dims = [one.batch_dims for one in assignment.operands]

        def local(arrays: Sequence[jax.Array], shared: Sequence[jax.Array]) -> Any:
            rows = list(map(matrix_rows, arrays, batch_dims))
            stacks = [
                jnp.concatenate([rows[at] for at in exchange.group.members])
                for exchange in exchanges
            ]
            results = _by_owners(exchanges, stacks, shared)
            for exchange, stack in zip(exchanges, results, strict=True):
                members = exchange.group.members
                ends = np.cumsum([len(rows[at]) for at in members])[:-1]
                for at, part in zip(members, jnp.split(stack, ends), strict=True):
                    rows[at] = part
            shapes = [array.shape for array in arrays]
            return list(map(from_matrix_rows, rows, shapes, batch_dims))

        specs = [self.specs[path] for path in paths]
        whole = [PartitionSpec()] * len(shared)
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(specs, whole),
            out_specs=specs,
            axis_names=set(self.mesh.axis_names),
            check_vma=False,
        )(list(arrays), list(shared))


def _by_owners(
    exchanges: Sequence[Exchange],
    stacks: Sequence[jax.Array],
    shared: Sequence[jax.Array],
) -> list[jax.Array]:
    """Return this device's shards of all results.

    All shards come before any work, and no result leaves before all is done: a device
    that owns nothing of one shape then waits for none that does.

    Args:
        exchanges: One of each group.
        stacks: This device's shard of every matrix of each.
        shared: Arrays that every operation takes beside its matrix.
    """
    # XLA:GPU gives a ragged all-to-all no name, so that the audit takes that of what it
    # moves: that of a barrier.
    with asked("owner_dispatch"):
        stacks = lax.optimization_barrier(stacks)
    sent = zip(exchanges, stacks, strict=True)
    chunks = [exchange.to_owners(stack) for exchange, stack in sent]
    chunks = lax.optimization_barrier(chunks)
    owned = zip(exchanges, chunks, strict=True)
    chunks = [exchange.computed(one, shared) for exchange, one in owned]
    with asked("owner_return"):
        chunks = lax.optimization_barrier(chunks)
    done = zip(exchanges, chunks, strict=True)
    return [exchange.from_owners(one) for exchange, one in done]


@dataclass(frozen=True, eq=False)
class Exchange:
    """The way of a group's matrices to their owners and back; methods run on shards.

    Args:
        assignment: The devices and their work.
        group: The group.
        has_ragged: As in `Owners`.
    """

    assignment: Assignment
    group: Group
    has_ragged: bool

    @cached_property
    def packing(self) -> Packing:
        """The order in which a device sends its rows."""
        return packing(self.assignment, self.group, is_padded=not self.is_ragged)

    @cached_property
    def is_ragged(self) -> bool:
        """True if the owners are not sent equally many matrices."""
        padded = packing(self.assignment, self.group, is_padded=True)
        return self.has_ragged and padded.num_owners > 1 and not padded.is_even

    def to_owners(self, rows: jax.Array) -> jax.Array:
        """Return (owners, room, shard), every shard of the matrices that it owns.

        Args:
            rows: This device's shard of every matrix.
        """
        packing = self.packing
        with asked("owner_dispatch"):
            packed = _take_rows(rows, packing.order, self._block, self._copy)
            if packing.num_owners > 1:
                packed = self._send(packed, to_owners=True)
        return packed.reshape(packing.num_owners, packing.room, *rows.shape[1:])

    def computed(self, chunks: jax.Array, shared: Sequence[jax.Array]) -> jax.Array:
        """Return the results of the operation on the matrices of `to_owners`."""

        def one(at: jax.Array, chunks: jax.Array) -> jax.Array:
            shards = lax.dynamic_index_in_dim(chunks, at, 1, keepdims=False)
            result = self.group.operation.function(self._join(shards), *shared)
            cut = self._cut(result)
            return lax.dynamic_update_index_in_dim(chunks, cut, at, 1)

        packing = self.packing
        if packing.is_even:
            return lax.fori_loop(0, packing.room, one, chunks)
        devices = self.assignment.devices(self.group.sharding)
        busiest = packing.counts.ravel()[devices.ravel() == self.assignment.busiest]
        with running_times(int(busiest[0])):
            return lax.fori_loop(
                0, self._on_device(packing.counts)[self._own], one, chunks
            )

    def from_owners(self, chunks: jax.Array) -> jax.Array:
        """Return this device's shard of every result; zeros for a row without one.

        Args:
            chunks: Results of `computed`.
        """
        packing = self.packing
        packed = lax.collapse(chunks, 0, 2)
        if packing.num_owners > 1:
            with asked("owner_return"):
                packed = self._send(packed, to_owners=False)
        if packing.num_copies > 1:
            with asked("owner_gather"):
                axes = self.group.sharding.copy_axes
                packed = lax.all_gather(packed, axes, tiled=True)
        return _take_rows(packed, packing.places, self._block)

    def _send(self, rows: jax.Array, *, to_owners: bool) -> jax.Array:
        """Send packed rows to their owners, or the rows of an owner back."""
        axes, packing = self.group.sharding.shard_axes, self.packing
        if not self.is_ragged:
            return lax.all_to_all(rows, axes, split_axis=0, concat_axis=0, tiled=True)
        counts, starts = (
            self._on_device(packing.counts),
            self._on_device(packing.starts),
        )
        first = jnp.arange(packing.num_owners, dtype=jnp.int32) * packing.room
        # Sizes and places on this device, and sizes and places of its rows on others.
        sent, received = (counts, starts), (counts[self._own], first[self._own])
        if not to_owners:
            sent, received = (counts[self._own], first), (counts, starts[self._own])
        sizes, at, own_sizes, own_at = (
            jnp.broadcast_to(one, counts.shape) for one in (*sent, *received)
        )
        size = packing.num_owners * packing.room if to_owners else packing.size
        out = jnp.zeros((size, *rows.shape[1:]), rows.dtype)
        return lax.ragged_all_to_all(
            rows, out, at, sizes, own_at, own_sizes, axis_name=axes
        )

    @property
    def _block(self) -> jax.Array | int:
        return shard_index(self.group.sharding.block_axes)

    @property
    def _copy(self) -> jax.Array | int:
        return shard_index(self.group.sharding.copy_axes)

    @property
    def _own(self) -> jax.Array | int:
        return shard_index(self.group.sharding.shard_axes)

    def _on_device(self, table: np.ndarray) -> jax.Array:
        """Return the entry of this device's block and place among the copies."""
        return jnp.asarray(table, jnp.int32)[self._block, self._copy]

    def _join(self, shards: jax.Array) -> jax.Array:
        """Return a matrix from the shards of all devices along the shard axes."""
        parts, order = self._parts
        x = shards.reshape(*parts, *shards.shape[1:]).transpose(order)
        sizes = zip(self._degrees, shards.shape[1:], strict=True)
        return x.reshape([degree * size for degree, size in sizes])

    def _cut(self, matrix: jax.Array) -> jax.Array:
        """Return the shards of a matrix."""
        parts, order = self._parts
        whole = (*parts, *self.group.sharding.shard)
        x = matrix.reshape([whole[at] for at in order]).transpose(np.argsort(order))
        return lax.collapse(x[None], 0, 1 + len(parts))

    @property
    def _degrees(self) -> list[int]:
        """Number of shards along each dim of a matrix."""
        return list(map(self.assignment.degree, self.group.sharding.dim_axes))

    @property
    def _parts(self) -> tuple[list[int], list[int]]:
        """Sizes of the shard axes, and the order of these and the dims in a matrix."""
        axes = self.group.sharding.shard_axes
        order = []
        for dim, own in enumerate(self.group.sharding.dim_axes):
            order += [*map(axes.index, own), len(axes) + dim]
        return [self.assignment.grid[axis] for axis in axes], order


def _take_rows(
    rows: jax.Array, table: np.ndarray, *device: jax.Array | int
) -> jax.Array:
    """Return the rows that a device's entry of a table names; zeros past the last."""
    num_rows = len(rows)
    if table.shape[-1] == num_rows and (table == np.arange(num_rows)).all():
        return rows
    at = jnp.asarray(table, jnp.int32)[device]
    if table.max() < num_rows:
        return rows.at[at].get(mode="promise_in_bounds")
    return rows.at[at].get(mode="fill", fill_value=0)
