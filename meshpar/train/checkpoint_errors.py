"""What goes wrong with checkpoints, in one line."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from meshpar.errors import InputError
from meshpar.train.late_answers import hide_late_answers


class CheckpointError(InputError, RuntimeError):
    """A checkpoint that could not be written or read."""


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint that was passed over for the one before it."""


class UncheckedCheckpointWarning(UserWarning):
    """A checkpoint without checksums: nothing tells whether its files have changed."""


def warn_unchecked(step: int, directory: Path | str) -> None:
    """Warns that a checkpoint which is read has no checksums."""
    warnings.warn(
        f"checkpoint of step {step} in {str(directory)!r} has no checksums, so "
        "damage to its files cannot be detected",
        UncheckedCheckpointWarning,
        stacklevel=3,
    )


@contextlib.contextmanager
def explained(directory: Path, what: str) -> Iterator[None]:
    """Whatever goes wrong inside as a `CheckpointError` that begins with `what`.

    Args:
        directory: Of the checkpoints, whose disk may be full.
        what: Could not be done.
    """
    hide_late_answers()
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # Orbax and TensorStore raise kinds of their own.
        raise CheckpointError(
            f"{what}: {reason_of(error, directory)}", key="checkpoint.unreadable"
        ) from error


def reason_of(error: Exception, directory: Path) -> str:
    """The first telling line of an error, or that the disk is full where it is."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Orbax introduces what it found by a line of its own that ends in a colon.
    telling = [line for line in lines if not line.endswith(":")] or lines
    try:
        space = os.statvfs(directory)
    except OSError as gone:
        return f"no folder {str(directory)!r} any more: {gone.strerror}"
    free_bytes = space.f_bavail * space.f_frsize
    if free_bytes < 1 << 20 or "No space left" in text:
        return (
            f"the disk is full: {free_bytes:,} free bytes are too few; free some or "
            "name another"
        )
    return telling[0] if telling else type(error).__name__
