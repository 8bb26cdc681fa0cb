"""A table of rows that ids choose, and how it may lie over devices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

import numpy as np

from meshpar.errors import InputError, nearest, whole_number

ROW_WISE, COLUMN_WISE = "row_wise", "column_wise"
TABLE_WISE, REPLICATED = "table_wise", "replicated"
KINDS = (ROW_WISE, COLUMN_WISE, TABLE_WISE, REPLICATED)
"""Row `id` on device `id mod devices`; a part of every row on each; whole on one
device; whole on every one."""

POOLINGS = ("sum", "mean")
ABSENT = -1
"""The id that fills a bag up: nothing is looked up."""

MOST_ROWS = 2**31 - 1
MOST_COLUMNS = 2**16
"""First values are drawn by row and column; a column's number has 16 bits there."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of `rows` vectors, whose rows the ids of one feature or more choose.

    Under each feature's name a batch has int32 ids (batch, bag), -1 to fill up a bag;
    an optional `NAME_weights` of the same shape has the weight of each id.

    Args:
        name: Name of the table.
        rows: Number of rows.
        dim: Values of a row.
        features: Arrays of a batch that look up in it; the one of its name when empty.
        bag: Most ids that an example has of a feature.
        pooling: `sum` of weight times row over a bag, or `mean`, that sum over the sum
            of weights; zeros for an empty bag.
        hashed: If True, any int32 id but -1 is hashed to a row; else ids are rows'
            numbers.
        bucket: Row for ids outside of 0 to `rows - 1`; without it they are an error.
        scale: First values are uniform within plus and minus this; `1 / sqrt(rows)`
            when 0 (Naumov et al. 2019).
        into: Name of the model's input, (batch, features, dim), that all tables of that
            name are looked up into, feature by feature.

    Raises:
        InputError: A size below 1, more rows than int32 can count, more than 65,536
            values of a row, no such pooling, a bucket outside the table, or one of a
            table that hashes; features, `hashed` or `scale` of another kind.
    """

    name: str
    rows: int
    dim: int
    features: tuple[str, ...] = ()
    bag: int = 1
    pooling: str = "sum"
    hashed: bool = False
    bucket: int | None = None
    scale: float = 0.0
    into: str = "embedded"

    def __post_init__(self) -> None:
        for field in ("name", "into"):
            if not isinstance(value := getattr(self, field), str):
                raise InputError(
                    f"a table has {field}={value!r}: must be a text",
                    key="tables.name_not_text",
                )
        for field in ("rows", "dim", "bag"):
            whole_number(f"table {self.name!r} has {field}", getattr(self, field))
        if self.rows > MOST_ROWS:
            raise InputError(
                f"table {self.name!r} has rows={self.rows}, but int32 ids count to "
                f"{MOST_ROWS}; hash the ids to fewer rows (hashed=True)",
                key="tables.too_many_rows",
            )
        if self.dim > MOST_COLUMNS:
            raise InputError(
                f"table {self.name!r} has dim={self.dim}, but a row has at most "
                f"{MOST_COLUMNS} values; split it into several tables",
                key="tables.too_many_columns",
            )
        if self.pooling not in POOLINGS:
            raise InputError(
                f"table {self.name!r} has no pooling {self.pooling!r}; "
                f"{nearest(str(self.pooling), POOLINGS)}",
                key="tables.unknown_pooling",
            )
        self._take_features()
        self._check_kinds()
        self._check_bucket()

    def _take_features(self) -> None:
        if isinstance(self.features, str):
            raise InputError(
                f"table {self.name!r} has features={self.features!r}; give a tuple, "
                f"({self.features!r},)",
                key="tables.features_not_tuple",
            )
        given = self.features
        names = tuple(given) if isinstance(given, Iterable) else (given,)
        if not all(isinstance(name, str) for name in names):
            raise InputError(
                f"table {self.name!r} has features={given!r}: must be a tuple of texts",
                key="tables.features_not_texts",
            )
        object.__setattr__(self, "features", names or (self.name,))

    def _check_kinds(self) -> None:
        if not isinstance(self.hashed, bool | np.bool_):
            raise InputError(
                f"table {self.name!r} has hashed={self.hashed!r}: must be True or "
                "False",
                key="tables.hashed_not_bool",
            )
        is_number = isinstance(self.scale, Real) and not isinstance(self.scale, bool)
        if not (is_number and 0 <= self.scale < math.inf):
            raise InputError(
                f"table {self.name!r} has scale={self.scale!r}: must be a finite "
                "number of at least 0",
                key="tables.scale_out_of_range",
            )

    def _check_bucket(self) -> None:
        if self.bucket is None:
            return
        if self.hashed:
            raise InputError(
                f"table {self.name!r} hashes its ids, so that none is outside; leave "
                f"bucket={self.bucket} or hashed=True out",
                key="tables.bucket_of_hashed",
            )
        whole_number(f"table {self.name!r} has bucket", self.bucket, least=0)
        if self.bucket >= self.rows:
            raise InputError(
                f"table {self.name!r} has bucket={self.bucket}, which is no row of "
                f"0 to {self.rows - 1}; name one of them, or give it a row more",
                key="tables.bucket_outside_table",
            )

    @property
    def initial_bound(self) -> float:
        """Bound of the absolute first values."""
        return self.scale or 1 / math.sqrt(self.rows)

    @property
    def lookups(self) -> int:
        """Most rows that an example looks up."""
        return self.bag * len(self.features)


def weights_name(feature: str) -> str:
    """Return the name of the array with the weights of a feature's ids."""
    return f"{feature}_weights"
