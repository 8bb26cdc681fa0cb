"""A run that cannot be saved goes on: the disk may have room the next time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from meshpar.recipes import report
from meshpar.recipes.run import Run
from meshpar.train.checkpoint import CheckpointError


@contextlib.contextmanager
def told_if_not_saved(run: Run) -> Iterator[None]:
    """Prints what keeps a checkpoint from being written; the one before it stays."""
    try:
        yield
    except CheckpointError as error:
        report.print_not_saved(run.console, error)
