"""Rows that a step with tables moves, by arithmetic.

On a device with `b` examples of `B`, `L` ids an example, rows of `d` values in fp32 and
`E` rows exchanged in a round (`meshpar.tables.exchange`), a step takes

    looking up    4 d bytes read and written for each row that the fullest device holds
                  of those that all examples ask for, B * (its lookups an example)
    updating      4 d bytes read, and 8 d + 8 read and written, for each of them
    bags          4 d bytes read for each of its ids, forward and backward, b * L
    all-to-all    two of 4 E bytes of ids, two of 4 d E bytes of rows

Assumed: every id is another one, so that none is sent once for several; one round is
enough; rows and optimizer state move at the memory's bandwidth, and nothing is counted
for making ids unique.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshpar.planner.machine.cluster import Link
from meshpar.planner.machine.collective_cost import all_to_all_s
from meshpar.tables.exchange import Exchange
from meshpar.tables.placement import Placements
from meshpar.tables.stores import SPREAD, Store

_VALUE_BYTES, _ID_BYTES = 4, 4


@dataclass(frozen=True, kw_only=True)
class TableTraffic:
    """Rows that a step moves, on the device that has most to do.

    Args:
        dim: Values of a row.
        held_rows: Rows of its own that all examples ask for.
        asked_rows: Rows that its own examples ask for.
        exchanged_rows: That it sends and gets in a round; 0 on one device.
    """

    dim: int
    held_rows: float
    asked_rows: float
    exchanged_rows: float

    @property
    def memory_bytes(self) -> float:
        """Read and written of its memory; this module says of what."""
        row = _VALUE_BYTES * self.dim
        return self.held_rows * (2 * row + 3 * row + 8) + self.asked_rows * 2 * row

    def sent_s(self, num_devices: int, link: Link) -> float:
        """Bytes of two all-to-alls of ids and two of rows."""
        ids = _ID_BYTES * self.exchanged_rows
        rows = _VALUE_BYTES * self.dim * self.exchanged_rows
        return 2 * sum(all_to_all_s(one, num_devices, link) for one in (ids, rows))


def table_traffic(
    stores: Sequence[Store], placements: Placements, global_batch: int
) -> tuple[TableTraffic, ...]:
    """Return bytes by `dim` on the device that holds most of the rows asked for."""
    devices = placements.num_devices
    most = max(range(devices), key=lambda at: placements.loads[at].lookups)
    examples = global_batch // devices
    found = []
    for dim in sorted({store.dim for store in stores}):
        placed = [one for one in placements.placed if one.table.dim == dim]
        held = sum(one.table.lookups * one.share(most, devices) for one in placed)
        exchanged = sum(
            _exchanged(store, examples)
            for store in stores
            if store.dim == dim and devices > 1
        )
        asked = sum(one.table.lookups for one in placed)
        found.append(
            TableTraffic(
                dim=dim,
                held_rows=global_batch * held,
                asked_rows=examples * asked,
                exchanged_rows=exchanged,
            )
        )
    return tuple(found)


def _exchanged(store: Store, examples: int) -> float:
    """Rows of a store that a device sends in a round; replicas gather as many."""
    if store.kind != SPREAD:
        return float(store.distinct(examples))
    exchange = Exchange.for_examples(store, ("all",), examples)
    return store.num_devices * float(exchange.room)
