"""Rows of metrics of an earlier run: refused, or cut where they come again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from meshpar import InputError
from meshpar.recipes import report
from meshpar.recipes.config import RunConfig


def refuse_rows(path: Path) -> None:
    """Keeps the metrics of two runs apart.

    Raises:
        InputError: The file holds something.
    """
    if path.is_file() and path.stat().st_size:
        num_rows = len(path.read_bytes().splitlines())
        raise InputError(
            f"{str(path)!r} holds {num_rows} rows of another run; delete it, or name "
            "another --out or --log-json"
        )


def begin_rows(config: RunConfig, console: Console) -> None:
    """Renames the file of a run that began before to FILE.before, or refuses it.

    Where a run may be one that began before (`resume="auto"`) its rows are of a start
    that ended before the first checkpoint.

    Raises:
        InputError: The file holds rows of another run.
    """
    if config.resume == "auto":
        path = config.metrics_path
        if path.is_file() and path.stat().st_size:
            report.print_renamed(console, path, path.replace(f"{path}.before"))
    else:
        refuse_rows(config.metrics_path)


def comes_again(row: dict[str, Any], done: int, steps: int) -> bool:
    """Whether a run resumed after `done` steps writes this row of metrics again."""
    is_final = "validation_loss" in row and row["step"] == steps - 1
    return row["step"] >= done or is_final
