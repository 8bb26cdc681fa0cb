"""Time limits for foreign code: chat templates, regular expressions of tokenizers."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

_T = TypeVar("_T")


class OverdueError(Exception):
    """A call has not ended within its time limit."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Stop the Python code of this thread that is inside once its time is over.

    A single call of a function in C is not stopped before it returns.

    Args:
        seconds: Time limit.

    Raises:
        OverdueError: The code inside takes longer.
    """
    thread, lock, is_done = threading.get_ident(), threading.Lock(), False

    def end() -> None:
        with lock:
            if not is_done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(OverdueError)
                )

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_done = True
        timer.cancel()


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """Return the result of a call that lets other threads run, such as a C library's.

    A call that takes longer goes on in a daemon thread until the program ends.

    Args:
        seconds: Time limit.
        call: Is called without arguments, in a thread of its own.

    Raises:
        OverdueError: The call takes longer.
    """
    found: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # A panic of Rust is no Exception.
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise OverdueError
    if failed:
        raise failed[0]
    return found[0]


def is_panic(error: BaseException) -> bool:
    """Return True if an error is a panic of a Rust library, which is no `Exception`."""
    return type(error).__name__ == "PanicException"
