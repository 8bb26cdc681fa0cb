"""Callbacks of TensorStore after a failed save, whose traces are not printed.

Seen with orbax-checkpoint 0.12.8 and tensorstore 0.1.86 on a full disk: the first chunk
that cannot be written ends Orbax's event loop. The other chunks end a moment later in
TensorStore's own threads, each calls the closed loop, and Python prints a trace of each
after the line that says what went wrong.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

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
