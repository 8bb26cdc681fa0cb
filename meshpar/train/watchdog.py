"""Ends a process that no longer gets on, once it has said where it stands."""

from __future__ import annotations

import threading
import time

from meshpar.distributed import Processes

STEP = "step"
"""The phase that comes back again and again."""

_OF_COMPILING = 4
"""Times the limit that a phase has in which a program is compiled."""


class Watchdog:
    """While active, a limit on the time that each phase of a run takes.

    A phase is over when the next one begins. Beyond the limit every
    process of the job writes the stacks of its threads to standard error, and all end
    with status 75 (`meshpar.distributed.LOST`): a collective that hangs does so for
    ever.

    Args:
        limit_s: Seconds; 0 for none. While something is compiled, four times that.
        processes: Of this job.
    """

    def __init__(self, limit_s: float, processes: Processes | None = None) -> None:
        self._limit_s = limit_s
        self._processes = processes or Processes()
        self._is_over = threading.Event()
        self._now = (STEP, _OF_COMPILING * limit_s, time.monotonic())

    def phase(self, name: str, *, compiles: bool = False) -> None:
        """What begins now, with time of its own.

        Args:
            name: As the line at its end is to call it, such as `saving`.
            compiles: Whether it may compile programs.
        """
        limit_s = self._limit_s * (_OF_COMPILING if compiles else 1)
        self._now = (name, limit_s, time.monotonic())

    def __enter__(self) -> Watchdog:
        if self._limit_s:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *of_error: object) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(min(self._limit_s / 4, 1.0)):
            name, limit_s, since = self._now
            if time.monotonic() > since + limit_s:
                what = "no step has ended" if name == STEP else f"{name} has not ended"
                self._processes.end_all(f"{what} for {limit_s:g} s", with_stacks=True)
                return
