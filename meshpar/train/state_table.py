"""A training state as a table of arrays: shapes, shards and bytes, never values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from meshpar.html import details, element, paragraph, table
from meshpar.layout.device_grid import device_grid
from meshpar.planner.plan import gigabytes
from meshpar.rules.sharding import path_name

if TYPE_CHECKING:
    from meshpar.train.state import TrainState
    from meshpar.train.step import TrainStep

_MOST_NAMED, _MOST_ROWS = 4, 40
_UNKNOWN = "?"


class ArrayRow(NamedTuple):
    """One array of a state.

    Args:
        path: Its path, such as `params.blocks.up`.
        shape, dtype: Global shape, and dtype by name.
        spec: Mesh axes of its dims; the kind of another sharding, or `?` for none.
        shard: Shape of a device's shard.
        shard_bytes: Bytes of a shard.
        memory: `host` for an array in the host's memory, else empty.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    shard: tuple[int, ...]
    shard_bytes: int
    memory: str


def array_rows(state: TrainState, shardings: TrainState | None = None) -> Iterator:
    """Yield a row for each leaf that has a shape: an array, also one that is gone.

    Args:
        state: Arrays or their shapes.
        shardings: The sharding of each; by default what the arrays themselves say.
    """
    leaves = jax.tree.leaves_with_path(state)
    known = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
    for (path, leaf), sharding in zip(leaves, known, strict=True):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            # A tracer has no sharding, or refuses to tell.
            traced = isinstance(leaf, jax.core.Tracer)
            lies = None if traced else sharding or getattr(leaf, "sharding", None)
            yield _row(path_name(path), leaf, lies)


def _row(path: str, leaf: Any, sharding: Any) -> ArrayRow:
    shard, spec, memory = tuple(leaf.shape), _UNKNOWN, ""
    if sharding is not None:
        shard = tuple(sharding.shard_shape(shard))
        spec = type(sharding).__name__
        memory = "host" if "host" in (sharding.memory_kind or "") else ""
    if isinstance(sharding, NamedSharding):
        spec = ", ".join(
            "+".join(one) if isinstance(one, tuple) else str(one or "-")
            for one in sharding.spec
        )
    return ArrayRow(
        path=path,
        shape=tuple(leaf.shape),
        dtype=str(leaf.dtype),
        spec=spec,
        shard=shard,
        shard_bytes=math.prod(shard) * leaf.dtype.itemsize,
        memory=memory,
    )


def state_text(state: TrainState) -> str:
    """Return totals and the largest arrays, in at most ten lines."""
    rows = list(array_rows(state))
    if not rows:
        return f"TrainState of {len(jax.tree.leaves(state))} leaves without shapes"
    lines = [f"TrainState: {_count(rows)}", *_parts(rows)]
    largest = sorted(rows, key=lambda row: -row.shard_bytes)[:_MOST_NAMED]
    lines += [
        f"  {row.path}: {row.dtype}{list(row.shape)} as ({row.spec}), "
        f"{gigabytes(row.shard_bytes)} each"
        for row in largest
    ]
    return "\n".join(lines)


def state_html(state: TrainState) -> str:
    """Return the HTML that a notebook shows for a state."""
    rows = list(array_rows(state))
    parts = [*map(paragraph, _parts(rows)), _table(rows)]
    return element(f"TrainState: {_count(rows)}", parts)


def step_html(step: TrainStep) -> str:
    """Return the HTML that a notebook shows for a step: devices, and its state."""
    rows = list(array_rows(step.state_shapes, step.shardings))
    parts = [
        paragraph(f"Platform {step.platform}."),
        *device_grid(step.layout),
        *map(paragraph, _parts(rows)),
        details(f"State: {_count(rows)}", _table(rows)),
    ]
    return element(f"TrainStep under {step.layout}", parts)


def _count(rows: Sequence[ArrayRow]) -> str:
    here = sum(row.shard_bytes for row in rows if not row.memory)
    on_host = sum(row.shard_bytes for row in rows if row.memory)
    if any(row.spec == _UNKNOWN for row in rows):
        return f"{len(rows)} arrays, {gigabytes(here)} in all"
    beside = f" and {gigabytes(on_host)} in its host's memory" if on_host else ""
    return f"{len(rows)} arrays, {gigabytes(here)} on each device{beside}"


def _parts(rows: Sequence[ArrayRow]) -> list[str]:
    """Return a line for each part of the state that is a tree."""
    parts: dict[str, list[ArrayRow]] = {}
    for row in rows:
        if "." in row.path:
            parts.setdefault(row.path.split(".")[0], []).append(row)
    return [f"  {name}: {_count(part)}" for name, part in parts.items()]


def _table(rows: Sequence[ArrayRow]) -> str:
    head = ["array", "shape", "dtype", "mesh axes", "shard", "on a device"]
    cells = [
        (
            row.path,
            " x ".join(map(str, row.shape)) or "scalar",
            row.dtype,
            row.spec,
            " x ".join(map(str, row.shard)) or "scalar",
            gigabytes(row.shard_bytes) + (f" ({row.memory})" if row.memory else ""),
        )
        for row in rows
    ]
    first = table(head, cells[:_MOST_ROWS])
    rest = cells[_MOST_ROWS:]
    return first + (details(f"{len(rest)} more", table(head, rest)) if rest else "")
