"""Metrics rows of an earlier run: refuse them, or cut those that come again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshpar import InputError
from meshpar.foreign_files import parse_json
from meshpar.recipes import host_times, report
from meshpar.recipes.config import RunConfig
from meshpar.recipes.run import Run
from meshpar.recipes.trackers import check_trackers
from meshpar.train.metrics import cut_rows


def refuse_rows(path: Path) -> None:
    """Keeps the metrics of two runs apart.

    Raises:
        InputError: The file holds something.
    """
    if path.is_file() and path.stat().st_size:
        num_rows = len(path.read_bytes().splitlines())
        raise InputError(
            f"{str(path)!r} holds {num_rows} rows of another run; delete it, or name "
            "another --out or --log-json",
            key="run.metrics_are_taken",
        )


def refuse_another_run(config: RunConfig, step: int) -> None:
    """Keeps the checkpoints of two runs apart.

    Raises:
        InputError: Always; `step` is that of the newest checkpoint there.
    """
    raise InputError(
        f"{str(config.out)!r} holds a run at step {step}; add --resume to go on "
        "with it, or name another --out",
        key="run.folder_is_taken",
    )


def check_files(config: RunConfig) -> None:
    """Refuses, before any work, a folder that is taken, and metrics without a place.

    Raises:
        InputError: There is a run that this one does not resume, the file of metrics
            cannot be, or a tracker is not installed.
    """
    names = [path.name for path in (config.folder / "checkpoints").glob("*")]
    steps = [int(name) for name in names if name.isdecimal()]
    if steps and not config.resume:
        refuse_another_run(config, max(steps))
    path = config.log_json
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
    except OSError as error:
        raise InputError(
            f"metrics cannot be written to {str(path)!r}: {error.strerror}; name "
            "another file in --log-json",
            key="run.unwritable_metrics",
        ) from error
    check_trackers(config)


def begin_rows(config: RunConfig) -> None:
    """Renames the file of a run that began before to FILE.before, or refuses it.

    Where a run may be one that began before (`resume="auto"`) its rows are of a start
    that ended before the first checkpoint.

    Raises:
        InputError: The file holds rows of another run.
    """
    if config.resume == "auto":
        path = config.metrics_path
        if path.is_file() and path.stat().st_size:
            report.log_renamed(path, path.replace(f"{path}.before"))
    else:
        refuse_rows(config.metrics_path)


def cut_rows_after(run: Run, back: int, done: int | None = None) -> None:
    """Cuts the rows of steps that come again, whose time was for nothing.

    Args:
        run: Of the metrics.
        back: Steps that count.
        done: Steps that this start has done; none when absent.

    Raises:
        InputError: The file holds something else; nothing is cut.
    """
    if not run.processes.is_first:
        return
    path, steps = run.config.metrics_path, run.config.steps
    before = path.read_bytes() if path.is_file() else b""
    cut_rows(path, lambda row: comes_again(row, back, steps))
    cut_rows(run.config.folder / host_times.NAME, lambda row: row["step"] >= back)
    kept_bytes = path.stat().st_size if path.is_file() else 0
    run.goodput.lose(_rows_in(before[kept_bytes:]), done, run.config.log_every)


def _rows_in(data: bytes) -> Iterator[dict[str, Any]]:
    """The rows of steps in it; what is none was left by a crash, and is cut as well."""
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            row = parse_json(line)
            if isinstance(row, dict) and "step" in row:
                yield row


def comes_again(row: dict[str, Any], done: int, steps: int) -> bool:
    """Return True if a run resumed after `done` steps writes this row again."""
    is_final = "validation_loss" in row and row["step"] == steps - 1
    return row["step"] >= done or is_final
