"""Owners of matrices: which device computes which, all of them equally much.

Matrices of all shapes and layers are shared out together, the most expensive first,
each to the device with the least work so far (Graham 1969, longest processing time
first). A matrix has its owner among the devices that hold a shard or a copy of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from meshpar.parallel.matrices import OnMatrices
from meshpar.rules.rules import entry_axes


@dataclass(frozen=True)
class Operand:
    """A global array of a parameter's dims, and the operation on its matrices.

    Args:
        operation: Operation on the array of one layer.
        shape: Its shape, with a leading dim of layers if there are any.
        spec: How it lies on the mesh.
        filled: Whether each place of the dim of layers holds one; None without it.
    """

    operation: OnMatrices
    shape: tuple[int, ...]
    spec: PartitionSpec
    filled: tuple[bool, ...] | None = None

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """Dims with a matrix for each place, that of layers first."""
        if self.filled is None:
            return self.operation.batch_dims
        return (0, *(dim + 1 for dim in self.operation.batch_dims))


@dataclass(frozen=True)
class MatrixSharding:
    """Sharding of matrices of one shape on a mesh; axes of size 1 are left out.

    Args:
        shard: Shape of a device's part of a matrix.
        dim_axes: Mesh axes that split each dim of a matrix.
        shard_axes: All of these, outermost first.
        block_axes: Mesh axes along which each device has other matrices.
        copy_axes: Mesh axes along which all devices have the same.
    """

    shard: tuple[int, ...]
    dim_axes: tuple[tuple[str, ...], ...]
    shard_axes: tuple[str, ...]
    block_axes: tuple[str, ...]
    copy_axes: tuple[str, ...]

    @classmethod
    def on_grid(cls, operand: Operand, grid: Mapping[str, int]) -> MatrixSharding:
        """Return the sharding of the matrices of an array.

        Args:
            operand: The array.
            grid: Size of each mesh axis.
        """
        entries = _entries(operand, grid)
        batch = operand.batch_dims
        own = [dim for dim in range(len(entries)) if dim not in batch]
        blocks = tuple(axis for dim in batch for axis in entries[dim])
        split = {axis for dim in own for axis in entries[dim]}
        large = [axis for axis, size in grid.items() if size > 1]
        return cls(
            shard=tuple(
                operand.shape[dim] // _degree(entries[dim], grid) for dim in own
            ),
            dim_axes=tuple(entries[dim] for dim in own),
            shard_axes=tuple(axis for axis in large if axis in split),
            block_axes=blocks,
            copy_axes=tuple(axis for axis in large if axis not in {*split, *blocks}),
        )


def _entries(operand: Operand, grid: Mapping[str, int]) -> list[tuple[str, ...]]:
    missing = (None,) * (len(operand.shape) - len(operand.spec))
    return [
        tuple(axis for axis in entry_axes(entry) if grid.get(axis, 1) > 1)
        for entry in (*operand.spec, *missing)
    ]


def _degree(axes: Sequence[str], grid: Mapping[str, int]) -> int:
    return math.prod(grid[axis] for axis in axes)


@dataclass(frozen=True, eq=False)
class Group:
    """Matrices of one shape that lie alike, of one array or several.

    Args:
        members: Indices of the arrays.
        operation: Operation on each matrix.
        sharding: How their values are split over the devices.
        filled: (blocks, rows), whether each row of a device along the block axes holds
            a matrix; its rows are the matrices of all members, one after another.
        owner: (blocks, rows), the owner of each row among the devices with this block:
            the index over copy axes and shard axes; -1 for a row that holds none.
    """

    members: tuple[int, ...]
    operation: OnMatrices
    sharding: MatrixSharding
    filled: np.ndarray
    owner: np.ndarray


@dataclass(frozen=True, eq=False)
class Assignment:
    """Groups with their owners, on the devices of a mesh.

    Args:
        operands: The arrays.
        grid: Size of each mesh axis.
        groups: The groups.
        flops: FLOPs of each device, devices numbered row-major over the grid.
    """

    operands: tuple[Operand, ...]
    grid: Mapping[str, int]
    groups: tuple[Group, ...]
    flops: np.ndarray

    @property
    def ideal_flops(self) -> float:
        """FLOPs of each device if all had equally many."""
        return float(self.flops.mean())

    @property
    def busiest(self) -> int:
        """The device with the most FLOPs."""
        return int(self.flops.argmax())

    def degree(self, axes: Sequence[str]) -> int:
        """Return the number of devices along some mesh axes."""
        return _degree(axes, self.grid)

    def devices(self, sharding: MatrixSharding) -> np.ndarray:
        """Return (blocks, owners), the device that is each owner of a block."""
        return _devices(sharding, self.grid)


def assign_owners(operands: Sequence[Operand], grid: Mapping[str, int]) -> Assignment:
    """Return an owner for each matrix of some arrays.

    Args:
        operands: The arrays.
        grid: Size of each mesh axis.

    Example:
        >>> operation = OnMatrices(abs, (), flops=10)
        >>> spec = PartitionSpec(None, "fsdp")
        >>> array = Operand(operation, (3, 4, 4), spec, filled=(True, True, True))
        >>> found = assign_owners([array], {"fsdp": 2})
        >>> found.groups[0].owner.tolist(), found.flops.tolist()
        ([[0, 1, 0]], [20, 10])
    """
    members: dict[Any, list[int]] = {}
    for at, one in enumerate(operands):
        key = (
            one.operation.function,
            one.operation.flops,
            MatrixSharding.on_grid(one, grid),
        )
        members.setdefault(key, []).append(at)
    rows = [
        np.concatenate([_filled(operands[at], grid) for at in group], axis=1)
        for group in members.values()
    ]
    shardings = [sharding for *_, sharding in members]
    costs = [flops for _, flops, _ in members]
    owners, flops = _balance(rows, shardings, costs, grid)
    groups = (
        Group(tuple(group), operands[group[0]].operation, *rest)
        for group, *rest in zip(members.values(), shardings, rows, owners, strict=True)
    )
    return Assignment(tuple(operands), grid, tuple(groups), flops)


def _filled(operand: Operand, grid: Mapping[str, int]) -> np.ndarray:
    """Return (blocks, rows), whether an array has a matrix there."""
    entries, batch = _entries(operand, grid), operand.batch_dims
    whole = np.ones([operand.shape[dim] for dim in batch], bool)
    if operand.filled is not None:
        whole &= np.array(operand.filled).reshape(-1, *(1,) * (len(batch) - 1))
    parts = [_degree(entries[dim], grid) for dim in batch]
    sizes = zip(parts, whole.shape, strict=True)
    cut = whole.reshape([n for part, size in sizes for n in (part, size // part)])
    order = [*range(0, cut.ndim, 2), *range(1, cut.ndim, 2)]
    return cut.transpose(order).reshape(math.prod(parts), -1)


def _devices(sharding: MatrixSharding, grid: Mapping[str, int]) -> np.ndarray:
    axes = (*sharding.block_axes, *sharding.copy_axes, *sharding.shard_axes)
    order = [*axes, *(axis for axis in grid if axis not in axes)]
    ids = np.arange(math.prod(grid.values())).reshape(tuple(grid.values()))
    names = list(grid)
    moved = ids.transpose([names.index(axis) for axis in order])
    return moved.reshape(_degree(sharding.block_axes, grid), -1)


def _balance(
    rows: Sequence[np.ndarray],
    shardings: Sequence[MatrixSharding],
    costs: Sequence[int],
    grid: Mapping[str, int],
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the owners of each group's rows, and the FLOPs of each device.

    Among devices with equal work the next owner is the one with the fewest matrices of
    the shape, then one whose copies have the fewest: where one has more, all make room.
    """
    work = np.zeros(math.prod(grid.values()), np.int64)
    owners = [np.full(one.shape, -1) for one in rows]
    for at in sorted(range(len(rows)), key=lambda at: -costs[at]):
        devices = _devices(shardings[at], grid)
        for block, filled in enumerate(rows[at]):
            own = devices[block]
            counts = np.zeros(len(own), np.int64)
            copy = np.arange(len(own)) // _degree(shardings[at].shard_axes, grid)
            for row in np.flatnonzero(filled):
                of_copy = np.bincount(copy, counts)[copy]
                owner = np.lexsort((of_copy, counts, work[own]))[0]
                owners[at][block, row] = owner
                counts[owner] += 1
                work[own[owner]] += costs[at]
    return owners, work


@dataclass(frozen=True, eq=False)
class Packing:
    """Rows of a group in the order of their owners, as a device sends them.

    A device sends the rows whose owners have the same place on the copy axes as itself.

    Args:
        num_copies: Devices with the same shard.
        num_owners: Devices that a matrix is split over.
        counts: (blocks, copies, owners), the matrices of each owner.
        starts: (blocks, copies, owners), where the rows of each owner start.
        size: Rows, at most.
        order: (blocks, copies, size), the row at each place; past the last for none.
        places: (blocks, rows), the place of each row among those that all copies send;
            past the last for none.
    """

    num_copies: int
    num_owners: int
    counts: np.ndarray
    starts: np.ndarray
    size: int
    order: np.ndarray
    places: np.ndarray

    @property
    def room(self) -> int:
        """Most matrices of one owner."""
        return int(self.counts.max())

    @property
    def is_even(self) -> bool:
        """True if every owner has as many."""
        return bool((self.counts == self.room).all())


def packing(assignment: Assignment, group: Group, *, is_padded: bool) -> Packing:
    """Return the packing of a group.

    Args:
        assignment: The devices.
        group: The group.
        is_padded: Whether every owner is sent as many rows as the one with the most.
    """
    sharding, owner = group.sharding, group.owner
    num_copies, num_owners = map(
        assignment.degree, (sharding.copy_axes, sharding.shard_axes)
    )
    every = np.arange(num_copies * num_owners)
    owned = owner[:, :, None] == every
    counts = owned.sum(1).reshape(len(owner), num_copies, num_owners)
    starts = np.cumsum(counts, -1) - counts
    size = int(counts.sum(-1).max())
    if is_padded:
        starts = np.broadcast_to(np.arange(num_owners) * counts.max(), counts.shape)
        size = num_owners * int(counts.max())
    before = (np.cumsum(owned, 1) - 1)[owned]
    block, row, at = np.nonzero(owned)
    first = at // num_owners * size + starts.reshape(len(owner), -1)[block, at]
    places = np.full(owner.shape, num_copies * size)
    places[block, row] = first + before
    order = np.full((len(owner), num_copies * size), owner.shape[1])
    order[block, places[block, row]] = row
    return Packing(
        num_copies=num_copies,
        num_owners=num_owners,
        counts=counts,
        starts=starts,
        size=size,
        order=order.reshape(len(owner), num_copies, size),
        places=places,
    )
