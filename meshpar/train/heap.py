"""The C library's heaps, which keep what is freed for the thread that had it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator

# `mallopt`'s parameters (glibc's malloc.h): when the free end of a heap goes back to
# the machine, what is mapped by itself, how many heaps there are at most.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8

_AT_FIRST = 1 << 17
"""The bytes of a free end that glibc begins with."""

_TRIM_AT_LAST, _MMAP_AT_LAST = 1 << 26, 1 << 25
"""Largest values that glibc raises them to as large blocks are freed (mallopt(3))."""

_MOST_HEAPS = 8
"""However many cores there are: what glibc makes by itself for one of them."""


def give_back() -> None:
    """Return freed memory to the machine, where the C library can (glibc).

    Otherwise each thread keeps what it read, wrote or compressed for a moment.
    """
    _function("malloc_trim")(0)


@contextlib.contextmanager
def returned_early() -> Iterator[None]:
    """Return the free end of each thread's heap at once, while active (glibc).

    Once blocks of 32 MiB have been freed, glibc keeps 64 MiB of each heap, of which
    `give_back` returns none but of the first. 344 MB restored by 8 threads' heaps took
    393 MB, and 363 MB so.

    Afterwards 64 MiB of each heap are kept, and blocks from 32 MiB on mapped by
    themselves, whatever is freed: for good, as glibc no longer moves what has been set.
    Where the environment sets either, nothing changes.
    """
    if _is_told("trim_threshold") or _is_told("mmap_threshold"):
        yield
        return
    mallopt = _function("mallopt")
    mallopt(_TRIM_THRESHOLD, _AT_FIRST)
    mallopt(_MMAP_THRESHOLD, _MMAP_AT_LAST)  # Once either is set neither rises.
    try:
        yield
    finally:
        mallopt(_TRIM_THRESHOLD, _TRIM_AT_LAST)


def share_heaps() -> None:
    """Let threads share as many heaps as this process has cores, 2 to 8 (glibc).

    By itself glibc makes eight for each core of the machine. Every save starts threads,
    and each heap that one of them uses fragments anew. Call it before threads start:
    glibc reads the number once, when there are more than eight heaps.
    """
    if not _is_told("arena_max"):
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        _function("mallopt")(_ARENA_MAX, min(max(cores, 2), _MOST_HEAPS))


def _is_told(name: str) -> bool:
    """Return True if the environment sets a parameter of malloc, by either name."""
    variable = f"MALLOC_{name.upper()}"
    tunables = os.environ.get("GLIBC_TUNABLES", "").split(":")
    return (
        variable in os.environ
        or f"{variable}_" in os.environ
        or any(one.startswith(f"glibc.malloc.{name}=") for one in tunables)
    )


@functools.cache
def _function(name: str) -> Callable[..., int]:
    """Return a function of the C library, or one that does nothing if it has none."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return lambda *arguments: 0
