"""The choice of the checkpoint that is read: the newest that every process can read."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import orbax.checkpoint as ocp

from meshpar.distributed import Processes
from meshpar.errors import InputError
from meshpar.train.checkpoint.files import damage, has_checksums, move_aside


class CheckpointError(InputError, RuntimeError):
    """A checkpoint that could not be written or read."""


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint that was passed over for the one before it."""


class UncheckedCheckpointWarning(UserWarning):
    """A checkpoint without checksums: nothing tells whether its files have changed."""


def warn_unchecked(step: int, directory: Path | str) -> None:
    """Warn that a checkpoint which is read has no checksums."""
    warnings.warn(
        f"checkpoint of step {step} in {str(directory)!r} has no checksums, so "
        "damage to its files cannot be detected",
        UncheckedCheckpointWarning,
        stacklevel=3,
    )


@contextlib.contextmanager
def explained(directory: Path, what: str) -> Iterator[None]:
    """Raise any error inside as a `CheckpointError` that begins with `what`.

    Args:
        directory: Folder of the checkpoints, whose disk may be full.
        what: Words for what could not be done.
    """
    hide_late_answers()
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # Orbax and TensorStore raise kinds of their own.
        raise CheckpointError(
            f"{what}: {error_reason(error, directory)}", key="checkpoint.unreadable"
        ) from error


def error_reason(error: Exception, directory: Path) -> str:
    """Return the first informative line of an error, or that the disk is full."""
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


_CLOSED = "Event loop is closed"


def hide_late_answers() -> None:
    """Print no trace of a call to a closed event loop; all other traces stay."""
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(_print_unless_late, sys.unraisablehook)


class _Hook(functools.partial[None]):
    """meshpar's hook, of a class of its own to tell it from others."""


def _print_unless_late(before: Callable[[Any], Any], raised: Any) -> None:
    is_closed = raised.exc_type is RuntimeError and str(raised.exc_value) == _CLOSED
    if not (is_closed and _only_asyncio(raised.exc_traceback)):
        before(raised)


def _only_asyncio(trace: TracebackType | None) -> bool:
    """Return whether all frames are asyncio's: a thread of TensorStore made the call.

    The first frame of a program that calls a closed loop is its own.
    """
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") != "asyncio.base_events":
            return False
        trace = trace.tb_next
    return True


class Choice:
    """The checkpoint that is read, once it is chosen, and those passed over for it.

    Args:
        manager: Orbax's manager of the folder.
        directory: Folder of the checkpoints, each in a folder of its step.
        processes: Processes of the run, which share the checks and choose the same.

    Attributes:
        step: Step of the chosen one; None before, and once another has been saved.
        damaged: Step -> damage of the checkpoints that were passed over.
    """

    def __init__(
        self, manager: ocp.CheckpointManager, directory: Path, processes: Processes
    ) -> None:
        self.step: int | None = None
        self.damaged: dict[int, str] = {}
        self._told: set[int] = set()
        self._unchecked: set[int] = set()
        self._manager, self._directory = manager, directory
        self._processes = processes

    def newest_good(self, at_most: int | None = None) -> int | None:
        """Choose the newest checkpoint without damage; see `Checkpoints`."""
        for step in sorted(self._manager.all_steps(), reverse=True):
            if step in self.damaged or (at_most is not None and step > at_most):
                continue
            of = self._processes
            of.gather(None)  # Barrier: every process has written its checksums.
            found = damage(
                self._directory / str(step),
                part=of.process_id,
                num_parts=of.num_processes,
            )
            told = next(filter(None, of.gather(found)), None)
            if told is None:
                self.step = step
                return step
            self.damaged[step] = told
        return None

    def read(
        self,
        reader: Callable[[Path], Any],
        check: Callable[[int], None] = lambda step: None,
    ) -> Any:
        """Read the newest checkpoint that all processes can read.

        An error in a checkpoint whose files match their checksums is raised; a damaged
        one is passed over.

        Args:
            reader: Folder of a checkpoint -> its contents; waits for no process.
            check: Refuses the checkpoint of a step.

        Raises:
            CheckpointError: There is none, or the newest cannot be read.
        """
        first: CheckpointError | None = None
        while True:
            step = self.newest_good() if self.step is None else self.step
            if step is None:
                raise first or self._absent()
            self._tell_damaged(step)
            self._tell_unchecked(step)
            check(step)
            folder, found = self._directory / str(step), None
            here: CheckpointError | None = None
            try:
                with explained(self._directory, self.unreadable(step)):
                    found = reader(folder)
            except CheckpointError as one:
                here = one
            error = self._any_error(here)
            if error is None:
                return found
            first = first or error
            if has_checksums(folder):
                raise CheckpointError(
                    f"{error}; its files are as they were written, so that it is not "
                    "passed over",
                    key=error.key,
                ) from error
            self.damaged[step], self.step = str(error), None

    def move_damaged_aside(self) -> None:
        """Rename damaged checkpoints, so that their steps can be saved again.

        Raises:
            CheckpointError: They cannot be renamed.
        """
        if not self.damaged:
            return
        told = None
        if self._processes.is_first:
            try:
                for step in self.damaged:
                    move_aside(self._directory / str(step))
            except OSError as error:
                told = f"damaged checkpoints not moved aside: {error}"
        told = self._processes.gather(told)[0]
        if told:
            raise CheckpointError(told, key="checkpoint.damaged_not_moved_aside")
        self._manager.reload()
        self.damaged = {}

    def unreadable(self, step: int | None) -> str:
        """Return the beginning of an error message."""
        return f"checkpoint of step {step} in {str(self._directory)!r} cannot be read"

    def _any_error(self, error: CheckpointError | None) -> CheckpointError | None:
        """Return this process's error, or another's: all read the same checkpoint."""
        here = None if error is None else (str(error), error.key)
        other = next(filter(None, self._processes.gather(here)), None)
        if error is not None or other is None:
            return error
        message, key = other
        return CheckpointError(message, key=key)

    def _tell_damaged(self, step: int) -> None:
        for other, why in self.damaged.items():
            if other not in self._told:
                self._told.add(other)
                warnings.warn(
                    f"checkpoint of step {other} in {str(self._directory)!r} is "
                    f"damaged: {why}; that of step {step} is read in its place",
                    DamagedCheckpointWarning,
                    stacklevel=4,
                )

    def _tell_unchecked(self, step: int) -> None:
        folder = self._directory / str(step)
        if step in self._unchecked or not folder.is_dir() or has_checksums(folder):
            return
        self._unchecked.add(step)
        warn_unchecked(step, self._directory)

    def _absent(self) -> CheckpointError:
        if self.damaged:
            step = max(self.damaged)
            return CheckpointError(
                f"{self.unreadable(step)}: {self.damaged[step]}",
                key="checkpoint.damaged",
            )
        return CheckpointError(
            f"no checkpoint in {str(self._directory)!r}; start without resuming, or "
            "name the folder of an earlier run",
            key="checkpoint.none_in_folder",
        )
