"""Metrics as JSON lines: one object a step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshpar.errors import InputError
from meshpar.foreign_files import parse_json


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
