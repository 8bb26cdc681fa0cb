"""A checkpoint that is being written while the run goes on."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, cast

import orbax.checkpoint as ocp

from meshpar.distributed import Processes
from meshpar.train.checksums import write_checksums
from meshpar.train.folders import remove_parts


class Saving:
    """One checkpoint until it stands whole on the disk.

    Args:
        manager: Orbax's, which writes it.
        directory: Where it lies in a folder of its step.
        step: Of its state.
        processes: Of the run; each notes checksums of its share of the files.
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
        self._written: Future[None] | None = None
        self._log = _Withheld()

    def begin(self, args: Any, writer: Executor, *, beside: bool = False) -> None:
        """Returns once the arrays may change; errors are for `end` to return.

        Args:
            args: What Orbax saves.
            writer: One thread for all saves: Orbax tells each thread that waits for one
                what the last one failed of.
            beside: The arrays stay as they are and no other process waits for this
                one: what Orbax does before it writes goes on beside the caller, too.
        """
        logging.getLogger("absl").addFilter(self._log)
        save = functools.partial(self._manager.save, self.step, args=args)
        self._written = writer.submit(self._write, save)
        if not beside:
            self.wait_until_begun()

    def wait_until_begun(self) -> None:
        """Until Orbax has taken the arrays, or could not."""
        self._is_begun.wait()

    def end(self) -> Exception | None:
        """Waits until all is written; what went wrong, if something did."""
        error = cast(Exception | None, self._written and self._written.exception())
        logging.getLogger("absl").removeFilter(self._log)
        if error is None:
            self._log.tell()
        else:
            self._remove_parts()
        return error

    def _write(self, save: Callable[[], bool]) -> None:
        try:
            is_taken = save() is not False
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

    def _remove_parts(self) -> None:
        """What is left of it would fill the disk for those that follow."""
        remove_parts(self._folder.parent, str(self.step))


class _Withheld(logging.Filter):
    """Keeps back the tracebacks that Orbax's threads log.

    They log what ends them before the error comes to whoever waits for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            self._records.append(record)
        return not record.exc_info

    def tell(self) -> None:
        """Logs them: no error came of them, so that nobody else tells."""
        for record in self._records:
            logging.getLogger("absl").handle(record)
