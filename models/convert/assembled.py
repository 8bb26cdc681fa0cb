"""Our arrays, as if they were read: each part is made of the tensors that hold it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshpar import InputError, Model
from meshpar.models.convert.row import Fitted, Row, Span
from meshpar.models.convert.source import Source
from meshpar.rules.sharding import insert

UNREAD = (
    *("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"),
    *("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
)
"""Ends of the names of tensors that older files hold, and that are no weights or are
there twice."""


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """One of our arrays, layers first to last, of which any part can be read.

    Args:
        rows: Each is a part of every layer; together they are all of it.
        shape: Global, with a leading dim of the layers where there are any.
        dtype: Of what is read.
        in_blocks: Whether there are.
        source: Where the tensors are.
    """

    rows: tuple[Fitted, ...]
    shape: tuple[int, ...]
    dtype: Any
    in_blocks: bool
    source: Source

    def __getitem__(self, index: Any) -> np.ndarray:
        """A part: a slice for each dim, of the first dims at least."""
        index = index if isinstance(index, tuple) else (index,)
        index = tuple(one for one in index if one is not Ellipsis)
        index += (slice(None),) * (len(self.shape) - len(index))
        spans = [
            one.indices(size)[:2] for one, size in zip(index, self.shape, strict=True)
        ]
        values = _empty([stop - start for start, stop in spans], self.dtype)
        if not self.in_blocks:
            self._read(values, 0, spans)
            return values
        (first, last), *own = spans
        for layer in range(first, last):
            self._read(values[layer - first, ...], layer, own)
        return values

    def _read(self, values: np.ndarray, layer: int, wanted: Sequence[Span]) -> None:
        """Read a part of one layer into an array."""
        for row in self.rows:
            found = row.read(self.source.read, layer, wanted)
            if found is not None:
                where, part = found
                values[where] = part


_ALIGNMENT = 64
"""Bytes that the address of an array divides by, for JAX on a CPU to share it."""


def _empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return an uninitialized array that JAX on a CPU uses without a copy."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def assembled(
    model: Model, table: Sequence[Row], source: Source, *, skipped: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and state of a model in the tensors of a source, nothing read yet.

    Args:
        model: As its family builds it, not arranged for stages.
        table: Of its family.
        source: The tensors.
        skipped: What begins the names of those that the model has no place for.

    Returns:
        Two trees of `Assembled`, like the model's parameters and a part of its state.

    Raises:
        InputError: A tensor is missing, has another shape than the model's, or is not
            in the table.
    """
    by_path: dict[str, list[Row]] = {}
    for row in table:
        by_path.setdefault(row.path, []).append(row)
    known = model.flat_parameters()
    missing = known.keys() - by_path.keys()
    if missing:
        raise InputError(
            f"the table of the family has no row for {min(missing)}",
            key="weights.parameter_without_row",
        )
    trees: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    unread = {
        name
        for name in source.names
        if not (name.endswith(UNREAD) or skipped and name.startswith(skipped))
    }
    for path, rows in by_path.items():
        of_state = rows[0].of_state
        array = _assembled(_declared(model, path, of_state), rows, source, unread)
        if array is not None:
            insert(trees[of_state], tuple(path.split(".")), array)
    if unread:
        raise InputError(
            f"{source.where!r} has {min(unread)!r} and {len(unread) - 1} others that "
            "the model has no place for; the config beside it is of another model",
            key="weights.unexpected_tensor",
        )
    return trees


def fitted(table: Sequence[Row], model: Model) -> Mapping[str, list[Fitted]]:
    """The rows of every path at the sizes of a model."""
    found: dict[str, list[Fitted]] = {}
    for row in table:
        parameter = _declared(model, row.path, row.of_state)
        found.setdefault(row.path, []).append(Fitted(row, parameter.shape))
    return found


def _declared(model: Model, path: str, of_state: bool) -> Any:
    tree: Any = model.state if of_state else model.parameters
    for key in path.split("."):
        tree = tree[key]
    return tree


def _assembled(
    parameter: Any, rows: Sequence[Row], source: Source, unread: set[str]
) -> Assembled | None:
    found = tuple(Fitted(row, parameter.shape) for row in rows)
    for one in found:
        for layer in range(parameter.num_layers or 1):
            for name in one.names(layer):
                if name not in source.names and one.row.optional:
                    return None
                _check(one, name, source)
                unread.discard(name)
    return Assembled(
        rows=found,
        shape=parameter.stacked_shape,
        dtype=np.dtype(parameter.dtype),
        in_blocks=parameter.num_layers is not None,
        source=source,
    )


def _check(row: Fitted, name: str, source: Source) -> None:
    if name not in source.names:
        raise InputError(
            f"{source.where!r} has no {name!r}, which {row.row.path} is read from; the "
            "config beside it is of another model, or a file is missing",
            key="weights.missing_tensor",
        )
    if source.shape(name) != row.their_shape:
        raise InputError(
            f"{name} in {source.where!r} has shape {source.shape(name)}, but the model "
            f"needs {row.their_shape} for {row.row.path}; the config beside it is of "
            "another model",
            key="weights.wrong_shape",
        )
