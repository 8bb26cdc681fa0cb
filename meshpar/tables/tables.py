"""Embedding tables of a model, and checks of the model and batches they go with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import InputError, nearest
from meshpar.model.inputs import Input, Inputs
from meshpar.tables.optimizers import TableOptimizer, array_structs, check_optimizer
from meshpar.tables.placement import AUTO, Placements, place_tables
from meshpar.tables.table import ABSENT, MOST_ROWS, Table, weights_name

_VALUE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class EmbeddingTables:
    """Tables, their optimizer and requested placement; see `embedding_tables`."""

    tables: tuple[Table, ...]
    optimizer: TableOptimizer
    placement: str | Mapping[str, str] = field(default=AUTO, hash=False)

    @cached_property
    def outputs(self) -> dict[str, tuple[str, ...]]:
        """Input of the model -> the features that are looked up into it, in order."""
        features: dict[str, tuple[str, ...]] = {}
        for table in self.tables:
            features[table.into] = (*features.get(table.into, ()), *table.features)
        return features

    @property
    def row_shapes(self) -> dict[str, tuple[int, int]]:
        """Input of the model -> (features, dim) of an example."""
        return {
            table.into: (len(self.outputs[table.into]), table.dim)
            for table in self.tables
        }

    @property
    def features(self) -> dict[str, Table]:
        """Feature -> its table."""
        return {name: table for table in self.tables for name in table.features}

    @property
    def inputs(self) -> dict[str, Input]:
        """Arrays of a batch that the tables read: ids, and optional weights."""
        inputs = {}
        for name, table in self.features.items():
            axes, shape = ("batch", None), (None, table.bag)
            inputs[name] = Input(axes, "int", shape=shape)
            inputs[weights_name(name)] = Input(axes, shape=shape, optional=True)
        return inputs

    def batch_inputs(self, model_inputs: Inputs) -> dict[str, Input]:
        """Return the arrays of a batch: the model's that are not looked up, and ids."""
        own = {
            name: one for name, one in model_inputs.items() if name not in self.outputs
        }
        return {**own, **self.inputs}

    def placements(self, num_devices: int) -> Placements:
        """Return the placement of the tables on `num_devices` devices.

        Raises:
            InputError: As for `embedding_tables`.
        """
        slots = self.optimizer.slots.values()
        return place_tables(
            self.tables,
            num_devices,
            {table.name: self.row_bytes(table) for table in self.tables},
            self.placement,
            whole_bytes=_VALUE_BYTES * sum(slot.per_row for slot in slots),
        )

    def row_bytes(self, table: Table) -> int:
        """Return the bytes of a row and its optimizer state."""
        structs = array_structs(self.optimizer, 1, table.dim)
        return _VALUE_BYTES * sum(one.size for one in structs.values())

    def check_model(self, inputs: Inputs) -> None:
        """Refuse a model that does not take what is looked up.

        Raises:
            InputError: An input is missing, has no gradient, or is of another shape, or
                has the name of an array that the tables take.
        """
        for name in self.inputs:
            if name in inputs:
                raise InputError(
                    f"batch[{name!r}] would be both an input of the model and ids or "
                    "weights of a table; rename the feature, Table(features=...)",
                    key="tables.feature_is_input",
                )
        for name, row in self.row_shapes.items():
            shape = (None, *row)
            wanted = f"Input(('batch', None, None), shape={shape}, has_gradient=True)"
            declared = inputs.get(name)
            if declared is None:
                raise InputError(
                    f"tables are looked up into {name!r}, but the model has the inputs "
                    f"{', '.join(inputs)}; declare {wanted}, or set Table into=",
                    key="tables.undeclared_input",
                )
            if declared.shape != shape or not declared.has_gradient:
                raise InputError(
                    f"tables are looked up into {name!r} as {shape[1:]} an example, "
                    f"but the model declares shape={declared.shape}, has_gradient="
                    f"{declared.has_gradient}; declare {wanted}",
                    key="tables.input_mismatch",
                )


def embedding_tables(
    tables: Sequence[Table],
    optimizer: TableOptimizer,
    *,
    placement: str | Mapping[str, str] = AUTO,
) -> EmbeddingTables:
    """Tables that may be larger than a device, for `meshpar.tables.with_tables`.

    Args:
        tables: `meshpar.tables.Table`s.
        optimizer: `SGD`, `RowwiseAdagrad` or `LazyAdam` of `meshpar.tables`, which
            updates the rows that a batch touches.
        placement: `row_wise`, `column_wise`, `table_wise` or `replicated` for all, or a
            dict of them by table. `auto`, the default also for tables that a dict
            leaves out, makes bytes and lookups even (`meshpar.tables.placement`).

    Raises:
        InputError: No table or none at all, two of one name or feature, a feature
            named as another one's weights, tables of different `dim` that are looked up
            into one input, or any other optimizer.

    Example:
        >>> from meshpar.tables import RowwiseAdagrad, Table
        >>> tables = embedding_tables(
        ...     [Table(name="film", rows=200_000, dim=16)], RowwiseAdagrad(0.05))
        >>> print(tables.placements(4))
        table film: 200,000 x 16, 13.6 MB, row_wise
        device 0: 3.4 MB, 0.25 lookups an example
        device 1: 3.4 MB, 0.25 lookups an example
        device 2: 3.4 MB, 0.25 lookups an example
        device 3: 3.4 MB, 0.25 lookups an example
        fullest over mean: 1.00 of the bytes that tables fill, 1.00 of the lookups
    """
    check_optimizer(optimizer)
    tables = _checked_tables(tables)
    _check_names([table.name for table in tables], "tables have the name")
    features = [name for table in tables for name in table.features]
    _check_names(features, "features have the name")
    for name in features:
        if weights_name(name) in features:
            raise InputError(
                f"feature {weights_name(name)!r} has the name of the weights of "
                f"feature {name!r}; rename one of them",
                key="tables.feature_named_as_weights",
            )
    dims: dict[str, int] = {}
    for table in tables:
        if dims.setdefault(table.into, table.dim) != table.dim:
            raise InputError(
                f"tables of dim={dims[table.into]} and {table.dim} are looked up into "
                f"{table.into!r}; give table {table.name!r} another into=",
                key="tables.differing_dims",
            )
    return EmbeddingTables(tables=tables, optimizer=optimizer, placement=placement)


def _checked_tables(tables: Sequence[Table]) -> tuple[Table, ...]:
    if isinstance(tables, Table | str | Mapping) or not isinstance(tables, Iterable):
        raise InputError(
            f"embedding_tables takes a list of tables, and was given a "
            f"{type(tables).__name__}; give [Table(...)]",
            key="tables.not_list",
        )
    tables = tuple(tables)
    for at, table in enumerate(tables):
        if not isinstance(table, Table):
            raise InputError(
                f"embedding_tables was given {table!r} at {at}, which is no table; "
                "give Table(name=..., rows=..., dim=...)",
                key="tables.not_table",
            )
    if not tables:
        raise InputError(
            "embedding_tables([]): give at least 1 table", key="tables.no_tables"
        )
    return tables


def _check_names(names: Sequence[str], what: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"{names.count(name)} {what} {name!r}; rename all but one",
                key="tables.duplicate_name",
            )


def check_ids(tables: tuple[Table, ...], batch: Mapping[str, Any]) -> None:
    """Refuse ids outside of a table that has no bucket for them.

    Only arrays on the host are read. In an array on a device an id outside makes its
    vector NaN, so that the step is skipped, and counted in `skipped`.

    Raises:
        InputError: An id is outside, or past int32 in any table, or an array of ids is
            missing, or has no whole numbers.
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
    """Refuse ids that a table would take as others, cut to 32 bits."""
    if low < -MOST_ROWS - 1 or high > MOST_ROWS:
        raise InputError(
            f"batch[{feature!r}] has id {high if high > MOST_ROWS else low}, but ids "
            f"are int32, {-MOST_ROWS - 1} to {MOST_ROWS}; take them modulo 2**31 first",
            key="batch.id_past_int32",
        )


def check_arrays(
    inputs: Inputs, outputs: Mapping[str, Sequence[str]], batch: Mapping[str, Any]
) -> None:
    """Refuse arrays that neither tables nor model read, and a batch of no examples.

    A misspelt `NAME_weights` would silently leave its bags unweighted.

    Args:
        inputs: Arrays that the tables and the model read.
        outputs: Input of the model -> the features that are looked up into it.
        batch: The batch.

    Raises:
        InputError: An array is not declared or looked up, or there are no examples.
    """
    for name in batch:
        if name in outputs:
            raise InputError(
                f"batch[{name!r}] is given, but is looked up in tables from "
                f"{', '.join(map(repr, outputs[name]))}; leave it out",
                key="batch.looked_up_array",
            )
        if name not in inputs:
            raise InputError(
                f"batch[{name!r}] is read by no table and not declared by the model; "
                f"leave it out, or declare it in inputs=: {nearest(str(name), inputs)}",
                key="batch.unknown_array",
            )
    shapes = [getattr(array, "shape", None) for array in batch.values()]
    if shapes and all(shape and shape[0] == 0 for shape in shapes):
        raise InputError(
            "the batch has 0 examples; give 1 or more", key="batch.no_examples"
        )
