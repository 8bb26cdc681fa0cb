"""Stores: one array of rows for all tables of one `dim` and kind, each a run of rows.

In a `spread` store (`row_wise` and `table_wise` tables) every device has `rows` local
rows, and *code* `device * rows + local row` names any of them. In a `columns` store
every device has a part of each row, in a `replicated` store each whole row; there the
code is the row. Every device holds as many rows of a store as the fullest device needs.
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
from meshpar.hardware.platforms import platform_named
from meshpar.tables.table import (
    COLUMN_WISE,
    MOST_ROWS,
    REPLICATED,
    ROW_WISE,
    TABLE_WISE,
    Table,
)

SPREAD, COLUMNS = "spread", "columns"
_STORE_KIND = {
    ROW_WISE: SPREAD,
    TABLE_WISE: SPREAD,
    COLUMN_WISE: COLUMNS,
    REPLICATED: "replicated",
}

_ALIGNMENT = 8
"""Rows of a device come in multiples of this, as TPUs tile them."""

Rows = TypeVar("Rows", jax.Array, np.ndarray)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Placement of one table.

    Args:
        table: The table.
        kind: One of `KINDS`.
        device: The device that holds a `table_wise` table.
    """

    table: Table
    kind: str
    device: int | None = None

    def share(self, device: int, num_devices: int) -> float:
        """Return the part of the table's lookups that a device does."""
        if self.kind == TABLE_WISE:
            return float(self.device == device)
        return 1 / num_devices

    def run_length(self, num_devices: int) -> int:
        """Return the rows that each device has, or the only one that has the table."""
        rows = self.table.rows
        return -(-rows // num_devices) if self.kind == ROW_WISE else rows


@dataclass(frozen=True, kw_only=True)
class Member:
    """A table in a store.

    Args:
        table: The table.
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
        name: Its name in the state.
        kind: `spread`, `columns` or `replicated`.
        dim: Values of a row.
        rows: Rows of a device.
        members: The tables in it.
        num_devices: Devices of the mesh.
    """

    name: str
    kind: str
    dim: int
    rows: int
    members: tuple[Member, ...]
    num_devices: int

    @property
    def shape(self) -> tuple[int, int]:
        """Global shape."""
        whole = self.rows * (self.num_devices if self.kind == SPREAD else 1)
        return whole, self.dim

    @property
    def num_codes(self) -> int:
        """Number of codes; this number itself stands for no row."""
        return self.shape[0]

    @property
    def local_dim(self) -> int:
        """Values of a row that a device has."""
        return self.dim // (self.num_devices if self.kind == COLUMNS else 1)

    def spec(
        self, mesh_axes: tuple[str, ...], *, per_row: bool = False
    ) -> PartitionSpec:
        """Return the spec of an array of a vector, or of a number, a row."""
        if self.kind == SPREAD:
            return PartitionSpec(mesh_axes)
        if self.kind == COLUMNS and not per_row:
            return PartitionSpec(None, mesh_axes)
        return PartitionSpec()

    def is_cyclic(self, member: Member) -> bool:
        """Return True if row r of the table lies on device r mod `num_devices`."""
        return self.kind == SPREAD and member.device is None

    def codes(self, member: Member, rows: Rows) -> Rows:
        """Return the codes of rows of a table."""
        if self.kind != SPREAD:
            return member.first + rows
        if member.device is not None:
            return member.device * self.rows + member.first + rows
        owner, local = rows % self.num_devices, rows // self.num_devices
        return owner * self.rows + member.first + local

    def run_length(self, member: Member) -> int:
        """Return the rows of a table's run on a device that has some."""
        rows = member.table.rows
        return -(-rows // self.num_devices) if self.is_cyclic(member) else rows

    @property
    def lookups(self) -> int:
        """Most rows that an example looks up in it."""
        return sum(member.table.lookups for member in self.members)

    def distinct(self, examples: int) -> int:
        """Return the most different codes that `examples` examples look up."""
        return min(examples * self.lookups, self.num_codes)

    @cached_property
    def features(self) -> tuple[tuple[str, Member], ...]:
        """Features that look up in it, with their tables, in order."""
        return tuple(
            (feature, member)
            for member in self.members
            for feature in member.table.features
        )


def make_stores(placed: Sequence[Placed], num_devices: int) -> tuple[Store, ...]:
    """Return the stores that hold all tables.

    Args:
        placed: The placement of each table.
        num_devices: Devices of the mesh.

    Raises:
        InputError: One has more rows than int32 counts.
    """
    grouped: dict[tuple[str, int], list[tuple[int, Placed]]] = {}
    for place, one in enumerate(placed):
        key = _STORE_KIND[one.kind], one.table.dim
        grouped.setdefault(key, []).append((place, one))
    return tuple(
        _make_store(kind, dim, group, num_devices)
        for (kind, dim), group in sorted(grouped.items())
    )


def _make_store(
    kind: str, dim: int, placed: Sequence[tuple[int, Placed]], num_devices: int
) -> Store:
    members, filled = [], [0] * num_devices
    # Tables of every device come first, at the same local rows.
    for place, one in sorted(placed, key=lambda pair: pair[1].device is not None):
        holders = range(num_devices) if one.device is None else (one.device,)
        first = filled[holders[0]]
        members.append(
            Member(table=one.table, place=place, first=first, device=one.device)
        )
        for device in holders:
            filled[device] += one.run_length(num_devices)
    store = Store(
        name=f"{kind}_{dim}",
        kind=kind,
        dim=dim,
        rows=-(-max(filled) // _ALIGNMENT) * _ALIGNMENT,
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


def lane_notes(stores: Sequence[Store], platform: str) -> tuple[str, ...]:
    """Return a line for each store whose rows do not fill the lanes of a TPU.

    XLA:TPU keeps such arguments in another layout than the one that it reads and writes
    rows in (temporary memory seen to grow with tables of 16 values, not with those of
    128; jax 0.10.2, compiled for tpu:v5p:2x2x2).
    """
    lanes = platform_named(platform).lanes
    return tuple(
        f"tables {', '.join(member.table.name for member in store.members)}: a device "
        f"has {store.local_dim} values of a row, no multiple of {lanes}, so that "
        "XLA:TPU may copy them whole in each step; make dim one, or place them row_wise"
        for store in stores
        if store.local_dim % lanes
    )
