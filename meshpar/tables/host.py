"""Tables whole on the host, whatever their placement: for checks, and to move them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshpar.errors import InputError
from meshpar.tables.ids import positions
from meshpar.tables.lookup import Shares
from meshpar.tables.stores import SPREAD, Member, Store

HostTables = dict[str, dict[str, np.ndarray]]


def host_tables(
    stores: Sequence[Store], arrays: Mapping[str, Mapping[str, Any]]
) -> HostTables:
    """Table -> its arrays, row by row.

    Args:
        stores: What holds the tables.
        arrays: Store -> its arrays, all on devices of this process.

    Raises:
        InputError: Other processes hold a part of them.
    """
    found: HostTables = {}
    for store in stores:
        whole = {name: _fetched(array) for name, array in arrays[store.name].items()}
        for member in store.members:
            places = store.codes(member, np.arange(member.table.rows))
            found[member.table.name] = {
                name: array[places] for name, array in whole.items()
            }
    return found


def stored_tables(
    stores: Sequence[Store],
    tables: Mapping[str, Mapping[str, np.ndarray]],
    shardings: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, jax.Array]]:
    """Undoes `host_tables`: the stores' arrays on their devices.

    Raises:
        InputError: A table is missing, or has another shape.
    """
    found: dict[str, dict[str, jax.Array]] = {}
    for store in stores:
        found[store.name] = {}
        for name, sharding in shardings[store.name].items():
            first = tables[store.members[0].table.name][name]
            whole = np.zeros((store.num_codes, *first.shape[1:]), np.float32)
            for member in store.members:
                values = tables[member.table.name][name]
                _check_shape(member, values, whole.shape[1:])
                places = store.codes(member, np.arange(member.table.rows))
                whole[places] = values
            found[store.name][name] = jax.device_put(whole, sharding)
    return found


def rows_looked_up(
    stores: Sequence[Store], shares: Shares, batch: Mapping[str, Any]
) -> np.ndarray:
    """Rows that each device looks up for a batch, (devices,).

    Of each share of the examples every id counts once; of a store that is split by
    columns a device looks up its part of each row, which counts as that part.

    Args:
        stores: What holds the tables.
        shares: How devices share the batch.
        batch: Ids of the global batch, on the host.
    """
    num_devices = stores[0].num_devices
    found = np.zeros(num_devices)
    for store in stores:
        codes = _codes(store, batch)
        for device, at in enumerate(shares.of_devices(len(codes))):
            own = codes[at]
            distinct = np.unique(own[own < store.num_codes])
            if store.kind == SPREAD:
                found += np.bincount(distinct // store.rows, minlength=num_devices)
            elif store.kind == "columns":
                found += len(distinct) / num_devices
            else:
                found[device] += len(distinct)
    return found


def _codes(store: Store, batch: Mapping[str, Any]) -> np.ndarray:
    """(examples, ids of a store's features)."""
    codes, _ = positions(store, batch)
    shapes = [np.shape(batch[feature]) for feature, _ in store.features]
    ends = np.cumsum([examples * bag for examples, bag in shapes])[:-1]
    parts = np.split(np.asarray(codes), ends)
    pairs = zip(parts, shapes, strict=True)
    return np.concatenate([part.reshape(shape) for part, shape in pairs], axis=1)


def _fetched(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise InputError(
            "other processes hold a part of the tables; fetch them where one process "
            "has all devices",
            key="tables.held_by_other_processes",
        )
    return np.asarray(array)


def _check_shape(member: Member, values: np.ndarray, rest: tuple[int, ...]) -> None:
    wanted = (member.table.rows, *rest)
    if values.shape != wanted:
        raise InputError(
            f"table {member.table.name!r} is given as {values.shape}, but is {wanted}; "
            "give it with the rows and dim that it was made with",
            key="tables.wrong_shape",
        )
