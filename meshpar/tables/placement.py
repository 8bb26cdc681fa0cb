"""Where every table lies: on which devices, in which array, and each device's load.

    replicated   tables so small that all devices of a step may look up all rows anyway
    row_wise     tables of a twentieth of a device's even share of all bytes, or more
    table_wise   all others, the heaviest first, each on the least loaded device

A device's load is the larger of its shares of the bytes of one `dim` and of all
lookups.

A *store* is one array of rows that holds all tables of one `dim` and kind, each table a
run of rows. In a `spread` store (`row_wise` and `table_wise` tables) every device has
`rows` local rows, and *code* `device * rows + local row` names any of them. In a
`columns` store every device has a part of each row, in a `replicated` store each whole
row; there the code is the row. Every device holds as many rows of a store as the
fullest device needs.

Reference: the greedy partitioner of Mudigere et al. 2022 ("Software-Hardware
Co-design for Fast and Scalable Training of Deep Learning Recommendation Models"), 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.errors import InputError, nearest
from meshpar.hardware.platforms import platform_named
from meshpar.tables.table import (
    COLUMN_WISE,
    KINDS,
    MOST_ROWS,
    REPLICATED,
    ROW_WISE,
    TABLE_WISE,
    Table,
)

AUTO = "auto"

SPREAD, COLUMNS = "spread", "columns"
_STORE_KIND = {
    ROW_WISE: SPREAD,
    TABLE_WISE: SPREAD,
    COLUMN_WISE: COLUMNS,
    REPLICATED: "replicated",
}

_SMALL_BYTES = 2**20
"""Tables up to this are replicated: about what a step sends of one anyway."""

_ROW_WISE_SHARE = 0.05
"""Part of an even share of all bytes by which a whole table may overfill a device."""

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
class Load:
    """Bytes and lookups of one device.

    Args:
        table_bytes: Rows and their optimizer state, padding included.
        lookups: Rows that it looks up for an example of the global batch, on average,
            every id counted; one of a part of each row counts as that part.
    """

    table_bytes: float
    lookups: float


@dataclass(frozen=True, kw_only=True)
class Placements:
    """Placement of all tables.

    Args:
        placed: The placement of each table.
        num_devices: Devices of the mesh.
        row_bytes: Table -> bytes of a row, its optimizer state included.
        whole_bytes: The part of those that a device holds whole where it has a part of
            the row.
    """

    placed: tuple[Placed, ...]
    num_devices: int
    row_bytes: Mapping[str, float]
    whole_bytes: float = 0.0

    @property
    def loads(self) -> tuple[Load, ...]:
        """Load of each device.

        Raises:
            InputError: Tables of one `dim` have more rows than int32 counts.
        """
        num_bytes = self._device_bytes
        return tuple(
            Load(
                table_bytes=num_bytes,
                lookups=math.fsum(
                    one.table.lookups * one.share(device, self.num_devices)
                    for one in self.placed
                ),
            )
            for device in range(self.num_devices)
        )

    @property
    def imbalance(self) -> Load:
        """The fullest device over the mean; 1 is even.

        Bytes of a device over the mean of those that tables fill; most lookups over
        their mean.
        """
        sizes = []
        for one in self.placed:
            row = self.row_bytes[one.table.name]
            if one.kind == COLUMN_WISE:
                row = self._part_bytes(row)
            copies = self.num_devices if one.kind in (COLUMN_WISE, REPLICATED) else 1
            sizes.append(one.table.rows * (row * copies))
        lookups = [load.lookups for load in self.loads]
        return Load(
            table_bytes=self._device_bytes * self.num_devices / math.fsum(sizes),
            lookups=max(lookups) * len(lookups) / math.fsum(lookups),
        )

    @property
    def _device_bytes(self) -> float:
        """Bytes of a device's part of every store."""
        total = 0.0
        for store in make_stores(self):
            row = self.row_bytes[store.members[0].table.name]
            if store.kind == COLUMNS:
                row = self._part_bytes(row)
            total += store.rows * row
        return total

    def _part_bytes(self, row_bytes: float) -> float:
        """Bytes of a device's part of a row that is split by columns."""
        return self.whole_bytes + (row_bytes - self.whole_bytes) / self.num_devices

    def __str__(self) -> str:
        """A line for each table, one for each device, and how uneven they are."""
        lines = [
            f"table {one.table.name}: {one.table.rows:,} x {one.table.dim}, "
            f"{one.table.rows * self.row_bytes[one.table.name] / 1e6:,.1f} MB, "
            + (f"{one.kind} on {one.device}" if one.kind == TABLE_WISE else one.kind)
            for one in self.placed
        ]
        lines += [
            f"device {device}: {load.table_bytes / 1e6:,.1f} MB, "
            f"{load.lookups:.2f} lookups an example"
            for device, load in enumerate(self.loads)
        ]
        uneven = self.imbalance
        lines.append(
            f"fullest over mean: {uneven.table_bytes:.2f} of the bytes that tables "
            f"fill, {uneven.lookups:.2f} of the lookups"
        )
        return "\n".join(lines)


def place_tables(
    tables: Sequence[Table],
    num_devices: int,
    row_bytes: Mapping[str, float],
    requested: str | Mapping[str, str] = AUTO,
    whole_bytes: float = 0.0,
) -> Placements:
    """Place all tables.

    Args:
        tables: All tables.
        num_devices: Devices of the mesh.
        row_bytes: Table -> bytes of a row, its optimizer state included.
        requested: A kind for all tables, one for each that is not chosen, or `auto`.
        whole_bytes: Bytes of a row's state that is one number a row.

    Raises:
        InputError: There is no such table or kind, or columns do not divide.

    Example:
        >>> tables = [Table(name="user", rows=10**7, dim=64),
        ...           Table(name="day", rows=7, dim=64)]
        >>> placements = place_tables(tables, 8, {"user": 260, "day": 260})
        >>> [one.kind for one in placements.placed]
        ['row_wise', 'replicated']
    """
    kinds = _requested_kinds(tables, requested)
    sizes = {table.name: table.rows * row_bytes[table.name] for table in tables}
    even_share = sum(sizes.values()) / num_devices
    for name, num_bytes in sizes.items():
        if kinds.get(name, AUTO) == AUTO:
            large = num_bytes > _ROW_WISE_SHARE * even_share
            kinds[name] = ROW_WISE if large else TABLE_WISE
            if num_bytes <= _SMALL_BYTES:
                kinds[name] = REPLICATED
    for table in tables:
        if kinds[table.name] == COLUMN_WISE and table.dim % num_devices:
            raise InputError(
                f"table {table.name!r} has dim={table.dim}, which does not divide over "
                f"{num_devices} devices column by column; make it a multiple, or place "
                f"the table {ROW_WISE}",
                key="tables.indivisible_columns",
            )
    whole = [table for table in tables if kinds[table.name] == TABLE_WISE]
    devices = _assign_devices(whole, num_devices, sizes)
    return Placements(
        placed=tuple(
            Placed(table=table, kind=kinds[table.name], device=devices.get(table.name))
            for table in tables
        ),
        num_devices=num_devices,
        row_bytes=dict(row_bytes),
        whole_bytes=whole_bytes,
    )


def _requested_kinds(
    tables: Sequence[Table], requested: str | Mapping[str, str]
) -> dict[str, str]:
    names = [table.name for table in tables]
    if isinstance(requested, str):
        requested = dict.fromkeys(names, requested)
    if not isinstance(requested, Mapping):
        raise InputError(
            f"placement={requested!r}: must be one of {', '.join((AUTO, *KINDS))}, or "
            "a dict of them by table",
            key="tables.placement_wrong_type",
        )
    for name, kind in requested.items():
        if name not in names:
            raise InputError(
                f"a placement is given for table {name!r}, but there are "
                f"{', '.join(names)}; name one of them",
                key="tables.unknown_table",
            )
        if kind not in (AUTO, *KINDS):
            raise InputError(
                f"table {name!r} has no placement {kind!r}; "
                f"{nearest(str(kind), KINDS)}",
                key="tables.unknown_placement",
            )
    return dict(requested)


def _assign_devices(
    tables: Sequence[Table], num_devices: int, sizes: Mapping[str, float]
) -> dict[str, int]:
    """Return the device of each table: heaviest table first, to the least loaded.

    Bytes are counted within each `dim`: the fullest device sets the rows of all there.
    """
    dim_bytes = dict.fromkeys((table.dim for table in tables), 0.0)
    for table in tables:
        dim_bytes[table.dim] += sizes[table.name]
    all_lookups = sum(table.lookups for table in tables) or 1

    def shares(table: Table) -> tuple[float, float]:
        return sizes[table.name] / dim_bytes[table.dim], table.lookups / all_lookups

    filled = {dim: [0.0] * num_devices for dim in dim_bytes}
    looked_up = [0.0] * num_devices
    devices = {}
    for table in sorted(tables, key=lambda table: (-max(shares(table)), table.name)):
        byte_share, lookup_share = shares(table)
        loads = [
            (one + byte_share, other + lookup_share)
            for one, other in zip(filled[table.dim], looked_up, strict=True)
        ]
        after = [(max(load), sum(load)) for load in loads]
        best = min(range(num_devices), key=after.__getitem__)
        devices[table.name] = best
        filled[table.dim][best], looked_up[best] = loads[best]
    return devices


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


def make_stores(placements: Placements) -> tuple[Store, ...]:
    """Return the stores that hold all tables.

    Raises:
        InputError: One has more rows than int32 counts.
    """
    grouped: dict[tuple[str, int], list[tuple[int, Placed]]] = {}
    for place, one in enumerate(placements.placed):
        key = _STORE_KIND[one.kind], one.table.dim
        grouped.setdefault(key, []).append((place, one))
    return tuple(
        _make_store(kind, dim, group, placements.num_devices)
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
