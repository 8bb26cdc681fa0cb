"""Read untrusted files, and run untrusted code, within limits of size and time.

What cannot be read is an `InputError` in one line: no such file, a pipe or a device,
which may have no end, more bytes than such a file has, other bytes than UTF-8, what is
no JSON, or JSON nested so deeply that reading it would end the program.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import reprlib
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Required, TypedDict, TypeVar, Unpack

from meshpar.errors import InputError

MOST_BYTES = 1 << 25
"""Size limit of settings, of an index of weights and of their header: 32 MiB."""

MOST_OPTIONS_BYTES = 1 << 18
"""Size limit of TOML, which holds options: 256 KiB."""

_MOST_DEEP = 100
"""Limit of objects and lists within one another."""

_MOST_VALUES = 10_000
"""Limit of values in YAML, where a few aliases may stand for any number of them."""

_MOST_DOTS = 200
"""Limit of dots in a line of TOML outside of texts: a key of n parts takes `tomllib`
n * n steps."""

_TOML_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*+"|\'[^\'\n]*+\'')

_MOST_YAML = 1 << 15
"""Limit of characters in YAML, which take 1 to 2 seconds to read."""

_BITS = 64
"""Limit of a whole number in TOML, as its definition says, and in YAML."""

_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}
_TYPES = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
_T = TypeVar("_T")


def open_file(path: str | Path) -> IO[bytes]:
    """Open a regular file, and nothing that would wait for a writer or never end.

    Raises:
        OSError: It cannot be opened, or it is a folder, a pipe or a device.
    """
    try:
        # Without waiting: opening a pipe that nobody writes to never returns.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # A NUL in the name, or half of a surrogate pair.
        told = "no file can have this name"
        raise OSError(errno.ENOENT, told, str(path)) from error
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        kind = next((word for of, word in _KINDS.items() if of(mode)), "no file")
        raise OSError(errno.EPERM, f"it is {kind}; give a file", str(path))
    return os.fdopen(number, "rb")


class Limits(TypedDict, total=False):
    """Options of all readers of files.

    Args:
        key: Key of the error.
        most: Bytes of the largest file that is read; `MOST_BYTES` when absent.
        kind: Class of the error; `InputError` when absent.
        way_out: What follows the reason in the error's message.
    """

    key: Required[str]
    most: int
    kind: type[InputError]
    way_out: str


def read_bytes(path: str | Path, **limits: Unpack[Limits]) -> bytes:
    """Return the bytes of a file.

    Raises:
        InputError: It cannot be read, or is larger.
    """
    return _read(path, "", lambda found: found, **limits)


def read_text(path: str | Path, **limits: Unpack[Limits]) -> str:
    """Return the UTF-8 text of a file, without a byte order mark; see `read_bytes`."""
    return _read(path, "", _utf8, **limits)


def read_json(path: str | Path, **limits: Unpack[Limits]) -> Any:
    """Return what a JSON file holds, of any type; see `read_bytes`."""
    return _read(path, " as JSON", parse_json, **limits)


def read_json_object(
    path: str | Path, *, shape_key: str, **limits: Unpack[Limits]
) -> dict[str, Any]:
    """Return the object that a JSON file holds; see `read_bytes`.

    Args:
        path: The file.
        shape_key: Key of the error where it holds something else.
        limits: As for the other readers.

    Raises:
        InputError: It cannot be read, or holds no object.
    """
    found = read_json(path, **limits)
    if isinstance(found, dict):
        return found
    kind, way_out = limits.get("kind", InputError), limits.get("way_out", "")
    raise kind(
        f"{str(path)!r} holds no JSON object, but {reprlib.repr(found)}{way_out}",
        key=shape_key,
    )


def read_toml(path: str | Path, **limits: Unpack[Limits]) -> dict[str, Any]:
    """Return the values of a TOML file; see `read_bytes`."""
    limits.setdefault("most", MOST_OPTIONS_BYTES)
    return _read(path, " as TOML", lambda found: parse_toml(_utf8(found)), **limits)


def parse_json(content: str | bytes) -> Any:
    """Return what JSON says, of a file or of a line of one.

    Raises:
        ValueError: It is none, is nested more than 100 levels deep, or has a number
            beyond all floats. The message has one line.

    Example:
        >>> parse_json('{"layers": 4}')
        {'layers': 4}
        >>> parse_json("[" * 100_000)
        Traceback (most recent call last):
        ValueError: it is nested too deeply
    """
    text = _utf8(content) if isinstance(content, bytes) else content
    try:
        found = json.loads(text, parse_int=_json_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # What reads or prints the values after this goes as deep as they do.
    if text.count("[") + text.count("{") > _MOST_DEEP and _depth(found) > _MOST_DEEP:
        raise ValueError("it is nested too deeply")
    return found


def parse_toml(text: str) -> dict[str, Any]:
    """Return the values of TOML.

    Raises:
        ValueError: It is none, is nested too deeply, or has a number of over 64 bits.
    """
    dots = max(line.count(".") for line in _TOML_TEXT.sub("", text).split("\n"))
    if dots > _MOST_DOTS:
        raise ValueError(f"a line has {dots:,} dots")
    import tomllib

    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_values(found)
    return found


def parse_yaml(text: str) -> tuple[Any, Sequence[str]]:
    """Return what YAML says, and the keys at its top as often as they stand there.

    Raises:
        ValueError: It is none, is nested too deeply, has a number of over 64 bits, or
            stands for more values than options are.
    """
    import yaml  # of flax; no other run needs it

    if len(text) > _MOST_YAML:
        raise ValueError(f"it has more than {_MOST_YAML:,} characters")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _check_size(root, {})
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_values(found)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    return found, [str(key.value) for key, _ in pairs]


def json_type(value: object) -> str:
    """Return what kind of JSON a value is, in words.

    Example:
        >>> json_type([1]), json_type(None), json_type(0.5)
        ('a list', 'null', 'a number')
    """
    return _TYPES.get(type(value), "null" if value is None else "a number")


def _read(
    path: str | Path,
    what: str,
    parse: Callable[[bytes], _T],
    *,
    key: str,
    most: int = MOST_BYTES,
    kind: type[InputError] = InputError,
    way_out: str = "",
) -> _T:
    try:
        with open_file(path) as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise ValueError(f"it has more than {most:,} bytes")
        return parse(content)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise kind(
            f"cannot read {str(path)!r}{what}: {error_reason(error)}{way_out}", key=key
        ) from error


def error_reason(error: BaseException) -> str:
    """Return why a file cannot be read, in one line and without its name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, UnicodeDecodeError):
        found = error.object[error.start]
        return f"it is not UTF-8 text: byte {error.start} is {found:#04x}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split()) or type(error).__name__


def _utf8(content: bytes) -> str:
    return content.decode("utf-8").removeprefix("\ufeff")


def _json_int(digits: str) -> int:
    number = int(digits)  # Of thousands of digits, a ValueError.
    try:
        float(number)
    except OverflowError:
        raise ValueError(f"a number has {len(digits)} digits") from None
    return number


def _depth(value: Any) -> int:
    """Return how many objects and lists are within one another."""
    level, deep = [value], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        deep += 1
        if deep > _MOST_DEEP:
            break
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return deep


def _check_size(node: Any, sizes: dict[int, int], deep: int = 0) -> int:
    """Return how many values a node of YAML stands for, its aliases written out.

    Raises:
        ValueError: They are too many, or endless.
    """
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise ValueError("an alias stands inside of what it names")
        return sizes[id(node)]
    if deep > _MOST_DEEP:
        raise ValueError("it is nested too deeply")
    sizes[id(node)] = 0  # While it is counted.
    inner = node.value if isinstance(node.value, list) else []
    parts = [part for one in inner for part in (one if type(one) is tuple else (one,))]
    total = 1 + sum(_check_size(part, sizes, deep + 1) for part in parts)
    if total > _MOST_VALUES:
        raise ValueError(f"it stands for more than {_MOST_VALUES:,} values")
    sizes[id(node)] = total
    return total


def _check_values(value: Any, deep: int = 0) -> None:
    """Refuse numbers that cannot be printed, and what is nested too deeply."""
    if deep > _MOST_DEEP:
        raise ValueError("it is nested too deeply")
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set):
        for one in value:
            _check_values(one, deep + 1)
    elif isinstance(value, int) and value.bit_length() > _BITS:
        raise ValueError(f"a whole number has {value.bit_length()} bits, not {_BITS}")


class OverdueError(Exception):
    """A call has not ended within its time limit."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Interrupt the body of the `with` statement after `seconds`.

    A call into C is interrupted only when it returns.

    Args:
        seconds: Time limit.

    Raises:
        OverdueError: The code inside takes longer.
    """
    import ctypes

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
