"""The error of what was given, which is no bug: its one line is all one needs."""

from __future__ import annotations

import difflib
import functools
import operator
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

_P, _R = ParamSpec("_P"), TypeVar("_R")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Also after `Path` has taken one of the two slashes away."""


_TURNS = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))
"""Characters that turn the direction of text."""


class InputError(ValueError):
    """Bad input: a value, a name, a file or a number of devices that cannot be used.

    The message says what was asked, what was found, and a way out. Every error that
    meshpar raises on purpose for bad input is one.

    Attributes:
        key: Stable name of the fault, for programs: `room.fault`, such as
            `layout.indivisible`. Messages may change with any release; a key does not.

    Example:
        >>> try:
        ...     whole_number("seq", 0)
        ... except InputError as error:
        ...     error.key
        'value.not_whole_number'
    """

    key: str = "input"

    def __init__(self, *args: object, key: str | None = None) -> None:
        super().__init__(*args)
        if key is not None:
            self.key = key


def renamed(old: str, function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function under its old name: each call warns of the new one."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        warnings.warn(
            f"{old} is now {function.__qualname__}; the old name goes away with the "
            "next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return function(*args, **kwargs)

    return call


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """The value, once it is a whole number of at least `least`.

    Raises:
        InputError: It is not; `name` says of what.

    Example:
        >>> whole_number("seq", 128)
        128
    """
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < least:
        raise InputError(
            f"{name}={value!r}: must be a whole number of at least {least}",
            key="value.not_whole_number",
        )
    return number


def local_path(name: str, value: str | Path) -> Path:
    """Return a path of this machine's own file system.

    Args:
        name: What the path is of, such as an option.
        value: The path.

    Raises:
        InputError: It is a URL, such as of a bucket, which a path would take for a
            folder `gs:` here.

    Example:
        >>> local_path("--out", "runs/one").name
        'one'
    """
    if _URL.match(str(value)):
        raise InputError(
            f"{name} {str(value)!r} is a URL, and meshpar reads and writes files of "
            "this machine alone: mount what it names, such as by gcsfuse or s3fs, and "
            "give the folder",
            key="value.url",
        )
    return Path(value)


def printable(text: str) -> str:
    r"""Escape what would move or recolour a terminal, or turn its text around.

    Names, messages and texts of others may hold such characters. Line feeds and tabs
    stay.

    Example:
        >>> printable("red: \x1b[31m") == r"red: \x1b[31m"
        True
    """
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    is_control = unicodedata.category(character) == "Cc" and character not in "\n\t"
    if not is_control and character not in _TURNS:
        return character
    return character.encode("unicode_escape").decode()


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: `did you mean ...? known: ...`."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}known: {', '.join(known) or 'none'}"
