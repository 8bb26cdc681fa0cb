"""Rows of a run: printed as they come, and written where the options say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def printed(rows: Iterable[Row], in_words: Callable[[Row], str]) -> list[Row]:
    """All rows, each printed in words as it comes."""
    found = []
    for row in rows:
        found.append(row)
        print(in_words(row), flush=True)
    return found


def write_rows(rows: Sequence[Row], path: str | None) -> None:
    """Writes one JSON object a line, where a path is given."""
    if path is not None:
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
