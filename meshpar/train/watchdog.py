"""Ends a process whose steps no longer end, once it has said where it stands."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from meshpar.distributed import Processes

_FIRST = 4
"""Times the limit that the first step has, which compiles."""


class Watchdog:
    """While active, a limit on the time from one step's end to the next one's.

    Beyond it every process of the job writes the stacks of its threads to standard
    error, and all end with status 75 (`meshpar.distributed.LOST`): a collective that
    hangs does so for ever.

    Args:
        limit_s: Seconds; 0 for none. Until the first step has ended, four times that.
        processes: Of this job.
    """

    def __init__(self, limit_s: float, processes: Processes | None = None) -> None:
        self._limit_s = limit_s
        self._processes = processes or Processes()
        self._until = time.monotonic() + _FIRST * limit_s
        self._is_over = threading.Event()

    def step_done(self) -> None:
        """A step has ended; the next one has its time from now on."""
        self._until = time.monotonic() + self._limit_s

    def __enter__(self) -> Watchdog:
        if self._limit_s:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(min(self._limit_s / 4, 1.0)):
            if time.monotonic() > self._until:
                self._processes.end_all(
                    f"no step has ended for {self._limit_s:g} s", with_stacks=True
                )
                return
