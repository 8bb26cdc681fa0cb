"""Where every table lies: on which devices, and each device's load.

    replicated   tables so small that all devices of a step may look up all rows anyway
    row_wise     tables of a twentieth of a device's even share of all bytes, or more
    table_wise   all others, the heaviest first, each on the least loaded device

A device's load is the larger of its shares of the bytes of one `dim` and of all
lookups.

Reference: the greedy partitioner of Mudigere et al. 2022 ("Software-Hardware
Co-design for Fast and Scalable Training of Deep Learning Recommendation Models"), 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshpar.errors import InputError, nearest
from meshpar.tables.stores import COLUMNS, Placed, Store, make_stores
from meshpar.tables.table import (
    COLUMN_WISE,
    KINDS,
    REPLICATED,
    ROW_WISE,
    TABLE_WISE,
    Table,
)

AUTO = "auto"

_SMALL_BYTES = 2**20
"""Tables up to this are replicated: about what a step sends of one anyway."""

_ROW_WISE_SHARE = 0.05
"""Part of an even share of all bytes by which a whole table may overfill a device."""


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

    @cached_property
    def stores(self) -> tuple[Store, ...]:
        """The stores that hold all tables.

        Raises:
            InputError: Tables of one `dim` have more rows than int32 counts.
        """
        return make_stores(self.placed, self.num_devices)

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
        for store in self.stores:
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
