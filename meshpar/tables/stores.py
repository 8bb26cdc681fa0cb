"""The arrays that hold all tables: those of one width, and alike in placement, in one.

A *store* is one array of rows, of which each table has a run. `spread` stores hold
`row_wise` and `table_wise` tables: every device has `rows_per_device` rows, and *code*
`device * rows_per_device + local row` names any. In `columns` stores every device has
all rows, a part of each; in `replicated` ones whole rows; there the code is the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.errors import InputError
from meshpar.tables.placement import Placed, Placements
from meshpar.tables.table import (
    COLUMN_WISE,
    MOST_ROWS,
    REPLICATED,
    ROW_WISE,
    TABLE_WISE,
    Table,
)

SPREAD, COLUMNS = "spread", "columns"
Rows = TypeVar("Rows", jax.Array, np.ndarray)
_STORE = {
    ROW_WISE: SPREAD,
    TABLE_WISE: SPREAD,
    COLUMN_WISE: COLUMNS,
    REPLICATED: "replicated",
}
TPU_LANES = 128
"""Values that TPUs tile the last dim by."""

ALIGNMENT = 8
"""Rows of a device come in multiples of this, as TPUs tile them."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A table in a store.

    Args:
        table: It.
        place: Its number among all tables, from which its first values derive.
        first: Local row at which its run begins.
        device: The device that has it; None where all have.
    """

    table: Table
    place: int
    first: int
    device: int | None = None


@dataclass(frozen=True, kw_only=True)
class Store:
    """One array of rows.

    Args:
        name: What it is called in the state.
        kind: `spread`, `columns` or `replicated`.
        dim: Values of a row.
        rows: Of a device.
        members: The tables in it.
        num_devices: Of the mesh.
    """

    name: str
    kind: str
    dim: int
    rows: int
    members: tuple[Member, ...]
    num_devices: int

    @property
    def shape(self) -> tuple[int, int]:
        """Global."""
        whole = self.rows * (self.num_devices if self.kind == SPREAD else 1)
        return whole, self.dim

    @property
    def num_codes(self) -> int:
        """Codes of rows are below this, which itself stands for none."""
        return self.shape[0]

    @property
    def local_dim(self) -> int:
        """Values of a row that a device has."""
        return self.dim // (self.num_devices if self.kind == COLUMNS else 1)

    def spec(
        self, mesh_axes: tuple[str, ...], *, of_row: bool = False
    ) -> PartitionSpec:
        """How an array of a vector, or a number, a row lies over the mesh."""
        if self.kind == SPREAD:
            return PartitionSpec(mesh_axes)
        if self.kind == COLUMNS and not of_row:
            return PartitionSpec(None, mesh_axes)
        return PartitionSpec()

    def codes(self, member: Member, rows: Rows) -> Rows:
        """The codes of rows of a table; of the store's arrays, where they are."""
        if self.kind != SPREAD:
            return member.first + rows
        if member.device is not None:
            return member.device * self.rows + member.first + rows
        owner, local = rows % self.num_devices, rows // self.num_devices
        return owner * self.rows + member.first + local

    def rows_at(
        self, member: Member, device: jax.Array | int, at: jax.Array
    ) -> jax.Array:
        """The table's rows at those places of its run on a device."""
        if self.kind == SPREAD and member.device is None:
            return at * self.num_devices + device
        return at

    def run_length(self, member: Member) -> int:
        """Rows of a table's run on a device that has some."""
        return run_length(member.table, self.kind, member.device, self.num_devices)

    @property
    def lookups(self) -> int:
        """Most rows that an example looks up in it."""
        return sum(member.table.lookups for member in self.members)

    def distinct(self, examples: int) -> int:
        """Most different codes that so many examples look up."""
        return min(examples * self.lookups, self.num_codes)

    @cached_property
    def features(self) -> tuple[tuple[str, Member], ...]:
        """What looks up in it, in order."""
        return tuple(
            (feature, member)
            for member in self.members
            for feature in member.table.features
        )


def stores_of(placements: Placements) -> tuple[Store, ...]:
    """The stores that hold all tables.

    Raises:
        InputError: One has more rows than int32 counts.
    """
    grouped: dict[tuple[str, int], list[tuple[int, Placed]]] = {}
    for place, one in enumerate(placements.placed):
        key = _STORE[one.kind], one.table.dim
        grouped.setdefault(key, []).append((place, one))
    return tuple(
        _store(kind, dim, found, placements.num_devices)
        for (kind, dim), found in sorted(grouped.items())
    )


def _store(
    kind: str, dim: int, placed: Sequence[tuple[int, Placed]], num_devices: int
) -> Store:
    members, filled = [], [0] * num_devices
    # First those that every device has, at the same local rows.
    for place, one in sorted(placed, key=lambda pair: pair[1].device is not None):
        having = range(num_devices) if one.device is None else (one.device,)
        first = filled[having[0]]
        members.append(
            Member(table=one.table, place=place, first=first, device=one.device)
        )
        for device in having:
            filled[device] += run_length(one.table, kind, one.device, num_devices)
    rows = -(-max(filled) // ALIGNMENT) * ALIGNMENT
    store = Store(
        name=f"{kind}_{dim}",
        kind=kind,
        dim=dim,
        rows=rows,
        members=tuple(sorted(members, key=lambda member: member.place)),
        num_devices=num_devices,
    )
    if store.num_codes > MOST_ROWS // 2:
        raise InputError(
            f"the tables of {dim} values have {store.num_codes:,} rows together, but "
            f"int32 codes count to {MOST_ROWS // 2:,}; hash ids to fewer rows",
            key="tables.too_many_rows_together",
        )
    return store


def tpu_notes(stores: Sequence[Store]) -> tuple[str, ...]:
    """A line for each store that a step on TPUs copies.

    Of rows that fill no whole tile XLA:TPU keeps the arguments in another layout than
    the one that it reads and writes rows in (temporary memory seen to grow with tables
    of 16 values, not with those of 128; jax 0.10.2, compiled for tpu:v5p:2x2x2).
    """
    return tuple(
        f"tables {', '.join(member.table.name for member in store.members)}: a device "
        f"has {store.local_dim} values of a row, no multiple of {TPU_LANES}, so that "
        "XLA:TPU may copy them whole in each step; make dim one, or place them row_wise"
        for store in stores
        if store.local_dim % TPU_LANES
    )


def run_length(table: Table, kind: str, device: int | None, num_devices: int) -> int:
    """Rows that each device has of a table, or the only one that has it."""
    shared = kind == SPREAD and device is None
    return -(-table.rows // num_devices) if shared else table.rows
