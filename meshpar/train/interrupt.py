"""Ctrl-C as a request to stop after the step that is running."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class StopRequest:
    """While active, SIGINT and SIGTERM are noted; a second one ends the program.

    Attributes:
        signal: Which; None before. A shell's status of what it ends is 128 more.

    Example:
        >>> with StopRequest() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.requested
        True
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the program is to stop."""
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        for number in self._SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *of_error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
