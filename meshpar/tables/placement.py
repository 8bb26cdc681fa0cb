"""Which device holds what of each table: chosen, or as asked; and every device's load.

    replicated   rows that all devices of a step may look up anyway
    row_wise     a twentieth of a device's even share of all bytes, or more
    table_wise   all others, the heaviest first, each on the device that has least

A device's load is the larger of its shares of the bytes of one `dim` and of all
lookups. Tables of one `dim` share an array, of which every device holds as many rows as
the fullest one needs.

Reference: the greedy partitioner of Mudigere et al. 2022 ("Software-Hardware
Co-design for Fast and Scalable Training of Deep Learning Recommendation Models"), 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshpar.errors import InputError
from meshpar.tables.table import (
    COLUMN_WISE,
    KINDS,
    REPLICATED,
    ROW_WISE,
    TABLE_WISE,
    Table,
    check_kind,
)

SMALL_BYTES = 2**20
"""Tables up to this are replicated: about what a step sends of one anyway."""

ROW_WISE_SHARE = 0.05
"""Of an even share of all bytes: so much a whole table may make a device fuller."""

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where a table lies.

    Args:
        table: It.
        kind: One of `KINDS`.
        device: Which device has it, where it is `table_wise`.
    """

    table: Table
    kind: str
    device: int | None = None

    def share(self, device: int, num_devices: int) -> float:
        """The part of its lookups that a device does."""
        if self.kind == TABLE_WISE:
            return float(self.device == device)
        return 1 / num_devices


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one device has to hold and to do.

    Args:
        table_bytes: Rows and their optimizer state, empty places included.
        lookups: Rows that it looks up for an example of the global batch, on average,
            every id counted; one of a part of each row counts as that part.
    """

    table_bytes: float
    lookups: float


@dataclass(frozen=True, kw_only=True)
class Placements:
    """Where all tables lie.

    Args:
        placed: Of each table.
        num_devices: Of all.
        row_bytes: Table -> bytes of a row, its optimizer state included.
        whole_bytes: Of those, what a device has whole where it has a part of the row.
    """

    placed: tuple[Placed, ...]
    num_devices: int
    row_bytes: Mapping[str, float]
    whole_bytes: float = 0.0

    @property
    def loads(self) -> tuple[Load, ...]:
        """Of each device.

        Raises:
            InputError: Tables of one `dim` have more rows than int32 counts.
        """
        num_bytes = self._bytes_of_device
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
        """How uneven it is: 1 is even.

        Bytes of a device over the mean of those that tables fill; most lookups over
        their mean.
        """
        filled = math.fsum(
            one.table.rows * self._row_bytes_of(one) for one in self.placed
        )
        lookups = [load.lookups for load in self.loads]
        return Load(
            table_bytes=self._bytes_of_device * self.num_devices / filled,
            lookups=max(lookups) * len(lookups) / math.fsum(lookups),
        )

    @property
    def _bytes_of_device(self) -> float:
        """Of its part of every store."""
        from meshpar.tables.stores import COLUMNS, stores_of  # which places members

        total = 0.0
        for store in stores_of(self):
            row = self.row_bytes[store.members[0].table.name]
            if store.kind == COLUMNS:
                row = self._part_bytes(row)
            total += store.rows * row
        return total

    def _row_bytes_of(self, one: Placed) -> float:
        """Bytes of a row over all devices."""
        row = self.row_bytes[one.table.name]
        if one.kind == COLUMN_WISE:
            row = self._part_bytes(row)
        return row * (self.num_devices if one.kind in (COLUMN_WISE, REPLICATED) else 1)

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
        return "\n".join(
            [
                *lines,
                f"fullest over mean: {uneven.table_bytes:.2f} of the bytes that tables "
                f"fill, {uneven.lookups:.2f} of the lookups",
            ]
        )


def placements_of(
    tables: Sequence[Table],
    num_devices: int,
    row_bytes: Mapping[str, float],
    asked: str | Mapping[str, str] = AUTO,
    whole_bytes: float = 0.0,
) -> Placements:
    """Where all tables lie.

    Args:
        tables: All of them.
        num_devices: Of the mesh.
        row_bytes: Table -> bytes of a row, its optimizer state included.
        asked: A kind for all tables, one for each that is not chosen, or `auto`.
        whole_bytes: Of a row's bytes, the state that is a number a row.

    Raises:
        InputError: There is no such table or kind, or columns do not divide.

    Example:
        >>> tables = [Table(name="user", rows=10**7, dim=64),
        ...           Table(name="day", rows=7, dim=64)]
        >>> found = placements_of(tables, 8, {"user": 260, "day": 260})
        >>> [one.kind for one in found.placed]
        ['row_wise', 'replicated']
    """
    kinds = _asked(tables, asked)
    total = sum(table.rows * row_bytes[table.name] for table in tables)
    for table in tables:
        if kinds.get(table.name, AUTO) == AUTO:
            num_bytes = table.rows * row_bytes[table.name]
            kinds[table.name] = _kind(num_bytes, total, num_devices)
    _check_columns(tables, kinds, num_devices)
    devices = _spread(tables, kinds, num_devices, row_bytes)
    return Placements(
        placed=tuple(
            Placed(table=table, kind=kinds[table.name], device=devices.get(table.name))
            for table in tables
        ),
        num_devices=num_devices,
        row_bytes=dict(row_bytes),
        whole_bytes=whole_bytes,
    )


def _asked(tables: Sequence[Table], asked: str | Mapping[str, str]) -> dict[str, str]:
    names = [table.name for table in tables]
    if isinstance(asked, str):
        asked = dict.fromkeys(names, asked)
    if not isinstance(asked, Mapping):
        raise InputError(
            f"placement={asked!r}: must be one of {', '.join((AUTO, *KINDS))}, or a "
            "dict of them by table",
            key="tables.placement_wrong_type",
        )
    for name, kind in asked.items():
        if name not in names:
            raise InputError(
                f"a placement is given for table {name!r}, but there are "
                f"{', '.join(names)}; name one of them",
                key="tables.unknown_table",
            )
        if kind != AUTO:
            check_kind(kind, name)
    return dict(asked)


def _kind(num_bytes: float, total: float, num_devices: int) -> str:
    if num_bytes <= SMALL_BYTES:
        return REPLICATED
    share = total / num_devices
    return ROW_WISE if num_bytes > ROW_WISE_SHARE * share else TABLE_WISE


def _check_columns(
    tables: Sequence[Table], kinds: Mapping[str, str], num_devices: int
) -> None:
    for table in tables:
        if kinds[table.name] == COLUMN_WISE and table.dim % num_devices:
            raise InputError(
                f"table {table.name!r} has dim={table.dim}, which does not divide over "
                f"{num_devices} devices column by column; make it a multiple, or place "
                f"the table {ROW_WISE}",
                key="tables.indivisible_columns",
            )


def _spread(
    tables: Sequence[Table],
    kinds: Mapping[str, str],
    num_devices: int,
    row_bytes: Mapping[str, float],
) -> dict[str, int]:
    """Table -> its device, the heaviest table first, to the one that has least.

    Bytes are counted within each `dim`: the fullest device sets the rows of all there.
    """
    own = [table for table in tables if kinds[table.name] == TABLE_WISE]
    dims = {table.dim for table in own}
    bytes_of = dict.fromkeys(dims, 0.0)
    for table in own:
        bytes_of[table.dim] += table.rows * row_bytes[table.name]
    all_lookups = sum(table.lookups for table in own) or 1

    def shares(table: Table) -> tuple[float, float]:
        num_bytes = table.rows * row_bytes[table.name]
        return num_bytes / bytes_of[table.dim], table.lookups / all_lookups

    filled = {dim: [0.0] * num_devices for dim in dims}
    asked = [0.0] * num_devices
    found = {}
    for table in sorted(own, key=lambda table: (-max(shares(table)), table.name)):
        of_bytes, of_lookups = shares(table)
        loads = [
            (one + of_bytes, other + of_lookups)
            for one, other in zip(filled[table.dim], asked, strict=True)
        ]
        after = [(max(load), sum(load)) for load in loads]
        best = min(range(num_devices), key=after.__getitem__)
        found[table.name] = best
        filled[table.dim][best], asked[best] = loads[best]
    return found
