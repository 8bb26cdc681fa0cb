"""One checkpoint while Orbax writes it, and the error that this ends with."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, cast

import orbax.checkpoint as ocp

from meshpar.distributed import Processes
from meshpar.train.checkpoint.choice import hide_late_answers
from meshpar.train.checkpoint.files import remove_parts, write_checksums


class Saving:
    """One checkpoint while it is written to the disk.

    Args:
        manager: Orbax's manager, which writes it.
        directory: Folder of the checkpoints.
        step: Step of its state.
        processes: Processes of the run; each notes checksums of its share of files.
    """

    def __init__(
        self,
        manager: ocp.CheckpointManager,
        directory: Path,
        step: int,
        processes: Processes,
    ) -> None:
        self.step = step
        self._processes = processes
        self._manager, self._folder = manager, directory / str(step)
        self._is_begun = threading.Event()
        self._save: Callable[[], bool] | None = None
        self._log = _Withheld()

    def begin(self, args: Any, writer: Executor) -> None:
        """Start to save; `end` returns errors.

        Args:
            args: Orbax's arguments. The arrays must not change before
                `wait_until_begun`.
            writer: One thread for all saves and for closing the manager: Orbax tells
                each thread that waits for a save once what it failed of.
        """
        self._save = functools.partial(self._manager.save, self.step, args=args)
        logging.getLogger("absl").addFilter(self._log)
        hide_late_answers()
        self._written = writer.submit(self._write)

    def wait_until_begun(self) -> None:
        """Wait until Orbax has taken the arrays, or has failed."""
        self._is_begun.wait()

    def end(self) -> Exception | None:
        """Wait until all is written, and return the error, if any."""
        error = cast(Exception | None, self._written.exception())
        logging.getLogger("absl").removeFilter(self._log)
        if error is None:
            self._log.tell()
        else:
            # What is left of it would fill the disk for those that follow.
            remove_parts(self._folder.parent, str(self.step))
        return error

    def _write(self) -> None:
        try:
            self._write_whole()
        except Exception as error:
            at: BaseException | None = error
            while at is not None:  # So that its frames hold no arrays.
                traceback.clear_frames(at.__traceback__)
                at = at.__cause__ or at.__context__
            raise

    def _write_whole(self) -> None:
        try:
            # No array is kept here: Orbax holds those that it needs.
            save, self._save = self._save, None
            is_taken = save is not None and save() is not False
            del save
        finally:
            self._is_begun.set()
        if not is_taken:
            newest = self._manager.latest_step()
            raise RuntimeError(f"skipped, as there is one of step {newest}")
        self._manager.wait_until_finished()
        if self._folder.is_dir():
            self._seal()

    def _seal(self) -> None:
        with contextlib.suppress(OSError):  # It is as good as one without checksums.
            write_checksums(
                self._folder,
                part=self._processes.process_id,
                num_parts=self._processes.num_processes,
            )


class _Withheld(logging.Filter):
    """Withhold the tracebacks that Orbax's threads log.

    They log what ends them before their error reaches the thread that waits for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            self._records.append(record)
        return not record.exc_info

    def tell(self) -> None:
        """Log them, if no error was raised that tells the same."""
        for record in self._records:
            logging.getLogger("absl").handle(record)
