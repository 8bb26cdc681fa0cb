"""Metrics as JSON lines: one object a step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType


class JsonLines:
    """Appends one JSON object per row to a file, so that a cut-off run keeps them all.

    Args:
        path: The file; its folder is made. What it holds already is kept.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, **row: float | int | str) -> None:
        """Writes one row and hands it to the operating system.

        JSON has no NaN and no infinity: a number that is not finite is written as null.

        Raises:
            OSError: The file, which it names, cannot be written.
        """
        values = {name: _finite_or_none(value) for name, value in row.items()}
        try:
            self._file.write(json.dumps(values, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError:  # The row that could not be written is tried again.
            if error is None:
                raise


def _finite_or_none(value: float | int | str) -> float | int | str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
