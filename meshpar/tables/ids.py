"""Ids of a batch: checked on the host, hashed or put into a bucket, made unique.

Every device handles its own share of the examples; an id that occurs in it more than
once is looked up, sent and summed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.errors import InputError
from meshpar.tables.stores import Store
from meshpar.tables.table import ABSENT, MOST_ROWS, Table, weights_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unique:
    """The different ids of a device's examples, in one store.

    Args:
        codes: Sorted, each once, then the store's `num_codes`; (slots,).
        slot: Where in `codes` each position's id is; (positions,), `slots` for none.
        order: The positions, those of equal ids together.
        weight: fp32, what each position counts in its bag's vector.
    """

    codes: jax.Array
    slot: jax.Array
    order: jax.Array
    weight: jax.Array


def check_ids(tables: tuple[Table, ...], batch: Mapping[str, Any]) -> None:
    """Refuses ids outside of a table that has no bucket for them.

    Of arrays on the host; one on a device is not fetched. An id outside that comes in
    on one makes its vector NaN, so that the step is skipped, and counted as such.

    Raises:
        InputError: An id is outside, or past int32 in any table, or an array of ids is
            missing, or is none of whole numbers.
    """
    if not isinstance(batch, Mapping):
        raise InputError(
            f"the batch is a {type(batch).__name__}; give a dict of arrays by name",
            key="batch.not_a_dict",
        )
    for table in tables:
        for feature in table.features:
            _check_array(table, feature, batch)
            ids = batch[feature]
            if not isinstance(ids, np.ndarray) or not ids.size:
                continue
            low, high = int(ids.min()), int(ids.max())
            if table.hashed or table.bucket is not None:
                _check_int32(feature, low, high)
                continue
            if low < ABSENT or high >= table.rows:
                wrong = low if low < ABSENT else high
                raise InputError(
                    f"batch[{feature!r}] has id {wrong}, but table {table.name!r} has "
                    f"{table.rows} rows, 0 to {table.rows - 1}, and {ABSENT} for none; "
                    "give it more rows, a bucket= for such ids, or hashed=True",
                    key="batch.id_outside_table",
                )


def _check_array(table: Table, feature: str, batch: Mapping[str, Any]) -> None:
    if feature not in batch:
        raise InputError(
            f"table {table.name!r} looks up batch[{feature!r}], but the batch has "
            f"{', '.join(map(repr, batch)) or 'nothing'}; add its ids",
            key="batch.missing_array",
        )
    ids = batch[feature]
    if not hasattr(ids, "shape") or not hasattr(ids, "dtype"):
        raise InputError(
            f"batch[{feature!r}] is a {type(ids).__name__}; give an array, such as "
            "numpy.asarray of it",
            key="batch.not_an_array",
        )
    shape = tuple(ids.shape)
    if len(shape) != 2 or shape[1] != table.bag:
        raise InputError(
            f"batch[{feature!r}] has shape {shape}, but table {table.name!r} takes "
            f"bags of {table.bag}: give it (examples, {table.bag}), {ABSENT} for none",
            key="batch.wrong_shape",
        )
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise InputError(
            f"batch[{feature!r}] has dtype {ids.dtype}, but ids of table "
            f"{table.name!r} are whole numbers: write {ABSENT} for those that are "
            "missing, then convert it with .astype(numpy.int32)",
            key="batch.ids_not_integers",
        )
    if isinstance(ids, jax.Array) and not np.can_cast(ids.dtype, np.int32):
        raise InputError(
            f"batch[{feature!r}] is on a device as {ids.dtype}, but ids are int32; "
            "convert it with .astype(numpy.int32) once they are below 2147483648",
            key="batch.ids_not_int32",
        )


def _check_int32(feature: str, low: int, high: int) -> None:
    """Refuses what a table would otherwise take as another id, cut to 32 bits."""
    if low < -MOST_ROWS - 1 or high > MOST_ROWS:
        raise InputError(
            f"batch[{feature!r}] has id {high if high > MOST_ROWS else low}, but ids "
            f"are int32, {-MOST_ROWS - 1} to {MOST_ROWS}; take them modulo 2**31 first",
            key="batch.id_past_int32",
        )


def positions(
    store: Store, batch: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The code and the weight of every id of a store's features, feature by feature."""
    codes, weights = [], []
    for feature, member in store.features:
        # Narrow ids would wrap where codes are computed.
        table, ids = member.table, batch[feature].astype(jnp.int32)
        rows, absent, outside = _rows(table, ids)
        given = batch.get(weights_of(feature))
        weight = jnp.ones(ids.shape) if given is None else given.astype(jnp.float32)
        weight = jnp.where(absent, 0.0, weight)
        if table.pooling == "mean":
            total = jnp.sum(weight, axis=1, keepdims=True)
            weight = jnp.where(
                total == 0, 0.0, weight / jnp.where(total == 0, 1, total)
            )
        codes.append(jnp.where(absent, store.num_codes, store.codes(member, rows)))
        weights.append(jnp.where(outside, jnp.nan, weight))
    flat = [jnp.concatenate([one.ravel() for one in many]) for many in (codes, weights)]
    return flat[0].astype(jnp.int32), flat[1]


def _rows(table: Table, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of ids, which of them are none, and which are outside of the table."""
    absent, never = ids == ABSENT, jnp.zeros(ids.shape, bool)
    if table.hashed:
        return hashed(ids, table.rows), absent, never
    outside = ~absent & ((ids < 0) | (ids >= table.rows))
    if table.bucket is not None:
        return jnp.where(outside, table.bucket, ids), absent, never
    return jnp.where(outside, 0, ids), absent, outside


def hashed(ids: jax.Array, rows: int) -> jax.Array:
    """A row for any int32: Murmur3's 32-bit finalizer (Appleby 2016), modulo `rows`.

    Example:
        >>> hashed(jnp.asarray([0, 1, 1 << 30]), 1000).tolist()
        [0, 727, 532]
    """
    mixed = ids.astype(jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return ((mixed ^ (mixed >> 16)) % jnp.uint32(rows)).astype(jnp.int32)


def unique(codes: jax.Array, weight: jax.Array, absent: int) -> Unique:
    """The different codes among those of all positions.

    Args:
        codes: (positions,), `absent` for none.
        weight: (positions,).
        absent: Above all codes.
    """
    size = min(len(codes), absent)
    ordered, order, slot = _sorted_slots(codes)
    found = jnp.full(size, absent, jnp.int32)
    # Equal codes write the same value; those of none that do not fit are dropped.
    found = found.at[slot].set(ordered, mode="drop", indices_are_sorted=True)
    of_position = jnp.zeros_like(slot).at[order].set(slot, unique_indices=True)
    return Unique(
        codes=found,
        slot=jnp.where(codes == absent, size, of_position),
        order=order,
        weight=weight,
    )


def summed(
    codes: jax.Array, values: jax.Array, absent: int
) -> tuple[jax.Array, jax.Array]:
    """Each code once, and the sum of its values.

    Args:
        codes: (n,), in any order, `absent` for none.
        values: (n, dim).
        absent: Above all codes.

    Returns:
        Sorted codes (n,), the places left over with codes from `absent` on, all of them
        different; sums (n, dim).
    """
    ordered, order, slot = _sorted_slots(codes)
    found = jnp.full(len(codes), absent, jnp.int32)
    found = found.at[slot].set(ordered, indices_are_sorted=True)
    found = jnp.where(found == absent, absent + jnp.arange(len(codes)), found)
    return found, summed_runs(values[order], slot, len(codes))


def summed_runs(values: jax.Array, slot: jax.Array, size: int) -> jax.Array:
    """(size, dim): at each slot the sum of the rows of that slot, which is sorted."""
    zeros = jnp.zeros((size, values.shape[1]), values.dtype)
    return zeros.at[slot].add(values, mode="drop", indices_are_sorted=True)


def _sorted_slots(codes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes in order, where each was, and how many different ones come before it."""
    places = lax.iota(jnp.int32, len(codes))
    ordered, order = lax.sort((codes, places), num_keys=1)
    is_new = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])
    return ordered, order, jnp.cumsum(is_new.astype(jnp.int32))
