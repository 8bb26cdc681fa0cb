"""Errors of the program itself: a status of their own, and a line after the trace."""

from __future__ import annotations

import io
import sys
import traceback
from typing import Any

from meshpar.errors import InputError, printable

FAULT = 70
"""Exit status of a program that failed by its own fault (EX_SOFTWARE of sysexits.h)."""

KEY = "program.fault"
"""What stands for the key of such an error in the output of `--json`."""


BAD_INPUT = 2
"""Exit status of a program that was given what it cannot use."""


def print_end(command: str, error: Exception) -> int:
    """Print why a program ends, and return its exit status.

    What it was given, or what the system does not let it read or write, is one line;
    all else is a fault of the program.

    Args:
        command: What the line begins with.
        error: What was raised.
    """
    if not isinstance(error, InputError | OSError):
        return print_fault(command, error)
    print(f"{command}: {printable(' '.join(str(error).split()))}", file=sys.stderr)
    return BAD_INPUT


def escape_unencodable(stream: Any) -> None:
    """Let a stream escape what it cannot encode, such as a file name of other bytes.

    Python does so on stderr; on stdout it would raise an error after the work is done.
    """
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def print_fault(command: str, error: BaseException) -> int:
    """Print an error that nobody has refused, and return the exit status.

    Args:
        command: What the line begins with.
        error: What was raised; its trace comes before the line.
    """
    lines = traceback.format_exception(error)
    print(printable("".join(lines)), end="", file=sys.stderr)
    print(f"{command}: {fault_line(error)}", file=sys.stderr)
    return FAULT


def fault_line(error: BaseException) -> str:
    """Return what is to be said of an error of the program, in one line.

    Example:
        >>> fault_line(KeyError("mlp"))
        "a fault of meshpar itself (KeyError: 'mlp'); please report it with its trace"
    """
    text = " ".join(str(error).split())
    told = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return printable(
        f"a fault of meshpar itself ({told}); please report it with its trace"
    )
