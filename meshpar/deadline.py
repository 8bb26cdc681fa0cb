"""Foreign code that is given a time: a chat template, a tokenizer's expressions."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

_T = TypeVar("_T")


class OverdueError(Exception):
    """What was given a time has not ended in it."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """End Python code of this thread that takes longer; a single call of C ends first.

    Raises:
        OverdueError: It has taken longer.
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
    """Return what a call gives that lets other threads run, such as a library's in C.

    One that takes longer goes on in a thread of its own, which ends with the program.

    Raises:
        OverdueError: It has taken longer.
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
    """Return whether a library written in Rust has failed, which is no `Exception`."""
    return type(error).__name__ == "PanicException"
