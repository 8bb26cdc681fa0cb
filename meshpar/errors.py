"""Errors of bad input and of the program itself, and what their lines say.

Every import of meshpar loads this module; what only an error needs is imported there.
"""

from __future__ import annotations

import functools
import io
import operator
import re
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

_P = ParamSpec("_P")
_R = TypeVar("_R")

BAD_INPUT = 2
"""Exit status of a program that was given what it cannot use."""

FAULT = 70
"""Exit status of a program that failed by its own fault (EX_SOFTWARE of sysexits.h)."""

FAULT_KEY = "program.fault"
"""Key of such an error in the output of `--json`."""

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


class RuleError(InputError):
    """A rule, or an array that the rules cannot lay out.

    `kind` is the lint's word for it: `unknown`, `repeated`, `claimed_twice`,
    `indivisible`, `shadowed`, `rank` or `dead`. The key tells more of them apart.
    """

    def __init__(self, kind: str, message: str, *, key: str) -> None:
        super().__init__(message, key=key)
        self.kind = kind


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
    """Return the value, checked to be a whole number of at least `least`.

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
    from pathlib import Path

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
    return "".join(
        one.encode("unicode_escape").decode()
        if one in _TURNS or (unicodedata.category(one) == "Cc" and one not in "\n\t")
        else one
        for one in text
    )


def install_extra(*extras: str) -> str:
    """Return the command that installs extras, for a wheel and for a checkout.

    Example:
        >>> install_extra("volumes", "plots")
        "pip install 'meshpar[volumes,plots]'"
    """
    return f"pip install 'meshpar[{','.join(extras)}]'"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of an unknown name's error: `did you mean ...? known: ...`."""
    import difflib

    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}known: {', '.join(known) or 'none'}"


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


_BESIDE = "besides, "


def note_beside(error: BaseException, other: Exception) -> None:
    """Note on the error that ends a run another one that happened beside it."""
    error.add_note(f"{_BESIDE}{other}")


def with_notes(told: str, error: BaseException) -> str:
    """Return one line: what is told of an error, and what happened beside it.

    Example:
        >>> error = ValueError("no such step")
        >>> note_beside(error, OSError("disk full"))
        >>> with_notes("stopped", error)
        'stopped; besides, disk full'
    """
    notes = getattr(error, "__notes__", ())  # Libraries leave some of their own.
    beside = [note for note in notes if note.startswith(_BESIDE)]
    return printable("; ".join(" ".join(part.split()) for part in (told, *beside)))


def print_fault(command: str, error: BaseException) -> int:
    """Print an error that nobody has refused, and return the exit status.

    Args:
        command: What the line begins with.
        error: What was raised; its trace comes before the line.
    """
    import traceback

    lines = traceback.format_exception(error)
    print(printable("".join(lines)), end="", file=sys.stderr)
    print(f"{command}: {fault_line(error)}", file=sys.stderr)
    return FAULT


def fault_line(error: BaseException) -> str:
    """Return one line that reports an error of the program.

    Example:
        >>> fault_line(KeyError("mlp"))
        "a bug in meshpar (KeyError: 'mlp'); please report it with its traceback"
    """
    text = " ".join(str(error).split())
    told = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return printable(f"a bug in meshpar ({told}); please report it with its traceback")


def key_value_pairs(
    text: str, *, noun: str, form: str, way_out: str
) -> list[tuple[str, str]]:
    """Return the keys and values of `text` in order, without the spaces around them.

    Args:
        text: What was written.
        noun: What errors call it.
        form: What each part must be, such as `key=value`.
        way_out: The end of the error about a part that is not.

    Raises:
        InputError: A part has no key or no value.

    Example:
        >>> key_value_pairs("a=1, a = 2", noun="text", form="key=value", way_out="")
        [('a', '1'), ('a', '2')]
    """
    pairs = []
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise InputError(
                f"{noun} {text!r}: {part.strip()!r} is not {form}; {way_out}",
                key=f"{_room(noun)}.not_key_value",
            )
        pairs.append((key, value))
    return pairs


def key_values(text: str, *, noun: str, example: str) -> dict[str, str]:
    """Return the values of `text` by key.

    Args:
        text: What was written.
        noun: What errors call it.
        example: What errors show.

    Raises:
        InputError: A part is not key=value, or a key is given twice.

    Example:
        >>> key_values("data=2,tensor=4", noun="layout", example="data=2")
        {'data': '2', 'tensor': '4'}
    """
    values: dict[str, str] = {}
    way_out = f"write for example {example}"
    for key, value in key_value_pairs(
        text, noun=noun, form="key=value", way_out=way_out
    ):
        if key in values:
            raise InputError(
                f"{noun} {text!r}: {key!r} is given twice; give it once",
                key=f"{_room(noun)}.repeated_key",
            )
        values[key] = value
    return values


def _room(noun: str) -> str:
    """The room of an error's key: `rules` of `--with-rules`."""
    return noun.rpartition("-")[2]


class DataError(InputError):
    """A file, or its content, cannot be trained on."""


class Skipped:
    """Broken lines and rows: an error at the first, or their number.

    Args:
        policy: "stop" or "skip".

    Attributes:
        count: Lines skipped so far.
        first: Description of the first of them.
    """

    def __init__(self, *, policy: str = "stop") -> None:
        self.policy = policy
        self.count = 0
        self.first = ""

    def take(self, what: str, *, key: str) -> None:
        """Skip a broken line, or raise.

        Args:
            what: The file, the line, and the fault.
            key: Key of the error.

        Raises:
            DataError: The policy is "stop".

        Example:
            >>> skipped = Skipped(policy="skip")
            >>> skipped.take("'a.jsonl', line 3: no JSON", key="data.not_json")
            >>> skipped.count, skipped.first
            (1, "'a.jsonl', line 3: no JSON")
        """
        if self.policy == "stop":
            raise DataError(f"{what}; mend it, or --on-bad-line skip", key=key)
        self.first = self.first or what
        self.count += 1
