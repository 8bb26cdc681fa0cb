"""A checkpoint that is being written while the run goes on."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from meshpar.distributed import Processes
from meshpar.train.checksums import write_checksums
from meshpar.train.folders import remove_parts

_LOOK_S = 0.05
"""Between looks whether it is there."""


class Saving:
    """One checkpoint from the copy of its arrays until it stands whole on the disk.

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
        self._error: Exception | None = None
        self._is_over = threading.Event()
        self._sealer: threading.Thread | None = None
        self._log = _Withheld()

    def begin(self, args: Any) -> None:
        """Returns once the arrays are copied; errors are for `end` to return.

        Args:
            args: What Orbax saves.
        """
        logging.getLogger("absl").addFilter(self._log)
        try:
            saved = self._manager.save(self.step, args=args)
        except Exception as error:  # Orbax and TensorStore raise kinds of their own.
            self._error = error
            return
        if saved is False:
            newest = self._manager.latest_step()
            self._error = RuntimeError(f"skipped, as there is one of step {newest}")
            return
        self._sealer = threading.Thread(target=self._seal, daemon=True)
        self._sealer.start()

    def end(self) -> Exception | None:
        """Waits until all is written; what went wrong, if something did."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # As above.
            self._error = self._error or error
        self._is_over.set()
        if self._sealer:
            self._sealer.join()
        logging.getLogger("absl").removeFilter(self._log)
        if self._error is None:
            self._log.tell()
        else:
            self._remove_parts()
        return self._error

    def _seal(self) -> None:
        """Writes the checksums once the folder has got its name."""
        while not self._folder.is_dir():
            if self._is_over.wait(_LOOK_S) and not self._folder.is_dir():
                return
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
