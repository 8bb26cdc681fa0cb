"""Rows of a run: logged as they come, and written where the options say."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

LOGGER = logging.getLogger("meshpar.recipes.rows")


def printed(rows: Iterable[Row], in_words: Callable[[Row], str]) -> list[Row]:
    """Return all rows, each logged in words as it comes."""
    found = []
    for row in rows:
        found.append(row)
        LOGGER.info(in_words(row))
    return found


def write_rows(rows: Sequence[Row], path: Path | None) -> None:
    """Writes one JSON object a line, where a path is given."""
    if path is not None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
