"""Phases of a run: guarded by the watchdog, and timed for the goodput."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

from meshpar.train.faults import STEP, Watchdog

Phase = Literal[
    "starting", "restoring", "compiling", "step", "data", "saving", "validating", "end"
]

_SAID = {
    "starting": "the start",
    "restoring": "beginning or restoring the state",
    "compiling": "the first step, which compiles,",
    "step": STEP,
    "data": "waiting for data",
    "saving": "saving a checkpoint",
    "validating": "validating",
    "end": "what follows the last step",
}
"""Names that the watchdog prints."""

_COMPILE = frozenset({"starting", "restoring", "compiling", "validating", "end"})


class Phases:
    """The phase that a run is in, and the seconds that it has spent in each.

    Args:
        watchdog: Is told of each.
        began: When the first began, by `time.perf_counter`; now when absent.

    Attributes:
        now: The phase.
    """

    def __init__(
        self, watchdog: Watchdog | None = None, began: float | None = None
    ) -> None:
        self.now: Phase = "starting"
        self._watchdog = watchdog or Watchdog(0)
        self._since = time.perf_counter() if began is None else began
        self._spent: defaultdict[str, float] = defaultdict(float)
        self.begin("starting")

    def begin(self, phase: Phase) -> None:
        """Ends the phase before."""
        now = time.perf_counter()
        self._spent[self.now] += now - self._since
        self.now, self._since = phase, now
        self._watchdog.phase(_SAID[phase], compiles=phase in _COMPILE)

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """A phase inside another, which goes on after it."""
        before = self.now
        self.begin(phase)
        try:
            yield
        finally:
            self.begin(before)

    def spent_s(self) -> dict[str, float]:
        """Seconds in each phase so far, the one that runs with them."""
        here = self._spent[self.now] + time.perf_counter() - self._since
        return {**self._spent, self.now: here}
