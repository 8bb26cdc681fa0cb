"""Embedding tables of a model: what they are, and how they lie over so many devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from meshpar.errors import InputError
from meshpar.model.inputs import Input, Inputs
from meshpar.tables.optimizers import (
    TableOptimizer,
    array_structs,
    check_optimizer,
)
from meshpar.tables.placement import AUTO, Placements, placements_of
from meshpar.tables.table import Table, weights_of

_VALUE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class EmbeddingTables:
    """Tables, what updates them, and where they are to lie (`embedding_tables`)."""

    tables: tuple[Table, ...]
    optimizer: TableOptimizer
    placement: str | Mapping[str, str] = field(default=AUTO, hash=False)

    @cached_property
    def outputs(self) -> dict[str, tuple[str, ...]]:
        """Input of the model -> the features that are looked up into it, in order."""
        found: dict[str, tuple[str, ...]] = {}
        for table in self.tables:
            found[table.into] = (*found.get(table.into, ()), *table.features)
        return found

    @property
    def row_shapes(self) -> dict[str, tuple[int, int]]:
        """Input of the model -> (features, dim) of each example's."""
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
        """What a batch has for them: ids and, where they are given, weights."""
        found = {}
        for name, table in self.features.items():
            axes, shape = ("batch", None), (None, table.bag)
            found[name] = Input(axes, "int", shape=shape)
            found[weights_of(name)] = Input(axes, shape=shape, optional=True)
        return found

    def inputs_beside(self, of_model: Inputs) -> dict[str, Input]:
        """What a batch has for them and for a model: all but what is looked up."""
        own = {name: one for name, one in of_model.items() if name not in self.outputs}
        return {**own, **self.inputs}

    def placements(self, num_devices: int) -> Placements:
        """Where they lie on so many devices.

        Raises:
            InputError: As for `embedding_tables`.
        """
        bytes_of = {table.name: self.row_bytes(table) for table in self.tables}
        slots = self.optimizer.slots.values()
        return placements_of(
            self.tables,
            num_devices,
            bytes_of,
            self.placement,
            whole_bytes=_VALUE_BYTES * sum(slot.of_row for slot in slots),
        )

    def row_bytes(self, table: Table) -> int:
        """Bytes of a row and its optimizer state."""
        structs = array_structs(self.optimizer, 1, table.dim)
        return _VALUE_BYTES * sum(one.size for one in structs.values())

    def check_model(self, inputs: Inputs) -> None:
        """Refuses a model that does not take what is looked up.

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
        tables: Each a `meshpar.tables.Table`.
        optimizer: `SGD`, `RowwiseAdagrad` or `LazyAdam` of `meshpar.tables`: what
            updates the rows that a batch touches.
        placement: `row_wise`, `column_wise`, `table_wise` or `replicated` for all, or a
            dict of them by table; `auto`, and what a dict leaves out, is chosen so that
            bytes and lookups are even (`meshpar.tables.placement`).

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
        if weights_of(name) in features:
            raise InputError(
                f"feature {weights_of(name)!r} has the name of the weights of feature "
                f"{name!r}; rename one of them",
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
