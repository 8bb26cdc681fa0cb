"""Metrics: JSON lines, one object a step; one number each for metrics of replicas."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import InputError
from meshpar.foreign_files import parse_json
from meshpar.parallel.reduction import safe_inverse


class JsonLines:
    """Append one JSON object per row to a file, so that a cut-off run keeps them all.

    Args:
        path: The file; its folder is made. What it holds already is kept.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, **row: float | int | str | None) -> None:
        """Write one row and hand it to the operating system.

        JSON has no NaN and no infinity: a number that is not finite is written as null.

        Raises:
            OSError: The file, which it names, cannot be written.
        """
        values = {
            name: None if isinstance(it, float) and not math.isfinite(it) else it
            for name, it in row.items()
        }
        try:
            self._file.write(json.dumps(values, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            self._file.close()
        except OSError:  # The row that could not be written is tried again.
            if error is None:
                raise


def cut_rows(path: Path, stale: Callable[[dict[str, Any]], bool]) -> None:
    """Cut a file of rows at the first that is stale, or that a crash left unfinished.

    Args:
        path: The file. Where there is none, or a pipe or device, nothing is done.
        stale: Whether a row is to go, and with it all that follow.

    Raises:
        InputError: A line before that is no JSON object with a `step`; nothing is cut.
    """
    if not path.is_file():
        return
    kept_bytes = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        unfinished = line.startswith(b"{") and not line.endswith(b"\n")
        if unfinished or stale(_row(path, number, line)):
            os.truncate(path, kept_bytes)
            return
        kept_bytes += len(line)


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise InputError(
            f"line {number} of {str(path)!r} is no row of metrics: {line[:40]!r}; name "
            "another file, or delete this one",
            key="run.unreadable_metrics",
        )
    return row


SUMMED = ("weight_sum", "skipped")
"""Metrics that are added up over replicas. `grad_norm` is averaged; all others, such as
the loss, are averaged with weights `weight_sum`: as in one batch, but for a head's term
that has other weights."""


def local_replica_metrics(metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return means and sums (`SUMMED`) of (replicas,) arrays over local replicas.

    Nothing crosses the link between processes; a single process has all replicas.
    """
    parts = [_parts(array) for array in metrics.values()]
    here = next(iter(parts[0][0].devices()))
    found = _combined(tuple(metrics), jax.device_put(parts, here))
    return dict(zip(metrics, found, strict=True))


def num_local_replicas(metric: jax.Array) -> int:
    """Return the number of replicas that this process holds devices of."""
    return len(_parts(metric))


def combined_metrics(
    rows: Sequence[Mapping[str, float]], here: Sequence[int], num_replicas: int
) -> dict[str, float]:
    """Return one row of metrics for the rows of all processes.

    Args:
        rows: The row of each process.
        here: Number of replicas that each holds devices of; several may share one.
        num_replicas: Number of all replicas.

    Example:
        >>> rows = [{"loss": 1.0, "weight_sum": 30}, {"loss": 2.0, "weight_sum": 10}]
        >>> combined_metrics(rows, [1, 1], 2)
        {'loss': 1.25, 'weight_sum': 40.0}
    """
    seen = sum(here)
    found = {}
    for name in rows[0]:
        if name in SUMMED:
            found[name] = sum(row[name] for row in rows) * num_replicas / seen
            continue
        shares: Sequence[float] = here
        if name != "grad_norm":
            shares = [row.get("weight_sum", 1) for row in rows]
        total = sum(shares)
        pairs = zip(rows, shares, strict=True)
        found[name] = (
            sum(row[name] * share for row, share in pairs) / total if total else 0.0
        )
    return found


def _parts(array: jax.Array) -> list[jax.Array]:
    """Return one device's copy for each local replica."""
    of_replica = {
        shard.index[0].start or 0: shard.data for shard in array.addressable_shards
    }
    return [of_replica[start] for start in sorted(of_replica)]


def _combine(names: tuple[str, ...], parts: list[list[jax.Array]]) -> list[jax.Array]:
    wholes = dict(zip(names, map(jnp.concatenate, parts), strict=True))
    weights = wholes.get("weight_sum", jnp.float32(1))
    total = jnp.sum(jnp.broadcast_to(weights, wholes[names[0]].shape))

    def one(name: str) -> jax.Array:
        whole = wholes[name]
        if name in SUMMED:
            return jnp.sum(whole)
        if name == "grad_norm":
            return jnp.mean(whole)
        return jnp.sum(whole * weights) * safe_inverse(total)

    return [one(name) for name in names]


_combined = jax.jit(_combine, static_argnums=0)
