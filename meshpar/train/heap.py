"""The C library's heap, which keeps what is freed for the thread that had it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def give_back() -> None:
    """Returns freed memory to the machine, where the C library can (glibc).

    What many threads read, write and compress for a moment would stay with each.
    """
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], int]:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return lambda pad: 0
