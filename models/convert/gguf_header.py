"""Read the header of a GGUF file: its named values, and where its tensors lie.

The `gguf` package believes every count in a file, so one of 2^60 keeps it busy for
ever, and it makes three NumPy arrays for each text, of which a vocabulary and its
merges have 100,000 (2 seconds). Here a count is held against the bytes that are left.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshpar.foreign_files import open_file

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_FORMATS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f"},
    **{7: "?", 10: "Q", 11: "q", 12: "d"},
}
"""Type of a value, as `gguf.GGUFValueType` numbers it -> its format in `struct`."""

_ALIGNMENT = "general.alignment", 32
"""Key of the alignment of tensors, and its default."""

_MOST_VALUES = 1 << 22
"""In all lists of a file; Gemma 3's files have 1,300,000."""
_MOST_FIELDS = 1 << 16
"""Values, and tensors, that have a name."""
_MOST_NAME_BYTES = 1 << 16
_MOST_TEXT_BYTES = 1 << 24
_MOST_DIMS = 8


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies.

    Args:
        shape: In NumPy's order: dims that lie apart first.
        kind: Its type, as `gguf.GGMLQuantizationType` numbers it.
        offset: Its first byte after the header.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass
class Header:
    """The header of a GGUF file, from `read_header`.

    Args:
        data: The file's bytes.
        values: Key -> number, list of numbers, bytes of a text, or list of them.
        tensors: Name -> where it lies.
        at: The next byte to read.
    """

    data: mmap.mmap
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    at: int = 0
    _num_values: int = 0

    @property
    def first_byte(self) -> int:
        """The first byte after the header, from which tensors are counted."""
        key, default = _ALIGNMENT
        alignment = self.values.get(key, default)
        is_size = isinstance(alignment, int) and alignment > 0
        if not is_size or alignment & (alignment - 1):
            raise ValueError(f"it has {key}={alignment!r}; known: powers of two")
        return -(-self.at // alignment) * alignment

    def read(self) -> None:
        """Read all of it.

        Raises:
            ValueError: It is no GGUF, or a count in it is beyond the file, or beyond
                what any model has.
        """
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin as GGUF does")
        version = self._number("I")
        if not version & 0xFFFF:
            raise ValueError("its bytes are in big-endian order; convert the file")
        if version not in _VERSIONS:
            raise ValueError(f"it is of version {version}; known: 2 and 3")
        tensors, values = self._number("Q"), self._number("Q")
        _at_most("named values", values, _MOST_FIELDS)
        _at_most("tensors", tensors, _MOST_FIELDS)
        for _ in range(values):
            key = self._new_name(self.values)
            self.values[key] = self._value(self._number("I"))
        for _ in range(tensors):
            name = self._new_name(self.tensors)
            self.tensors[name] = self._tensor()

    def _new_name(self, known: dict[str, Any]) -> str:
        name = self._text(_MOST_NAME_BYTES).decode()
        if name in known:
            raise ValueError(f"it has {name!r} twice")
        return name

    def _tensor(self) -> TensorEntry:
        dims = self._number("I")
        _at_most("dims of a tensor", dims, _MOST_DIMS)
        shape = tuple(self._number("Q") for _ in range(dims))[::-1]
        kind = self._number("I")
        _at_most("values of a tensor", math.prod(shape), 8 * len(self.data))
        offset = self._number("Q")
        _at_most("bytes before a tensor", offset, len(self.data))
        return TensorEntry(shape=shape, kind=kind, offset=offset)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text(_MOST_TEXT_BYTES)
        if kind == _ARRAY:
            return self._list()
        return self._number(_format(kind))

    def _list(self) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            raise ValueError("it has a list of lists")
        self._num_values += count
        _at_most("values of lists", self._num_values, _MOST_VALUES)
        if kind == _STRING:
            return [self._text(_MOST_TEXT_BYTES) for _ in range(count)]
        numbers = f"<{count}{_format(kind)}"
        return list(struct.unpack(numbers, self._take(struct.calcsize(numbers))))

    def _text(self, most: int) -> bytes:
        size = self._number("Q")
        _at_most("bytes of a text", size, most)
        return self._take(size)

    def _number(self, format_: str) -> Any:
        format_ = f"<{format_}"
        return struct.unpack(format_, self._take(struct.calcsize(format_)))[0]

    def _take(self, size: int) -> bytes:
        found = self.data[self.at : self.at + size]
        if len(found) < size:
            raise ValueError("it is cut off in its header; copy it again")
        self.at += size
        return found


def read_header(path: str | Path) -> Header:
    """Read the header of a file.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is no GGUF, or a count in it is beyond the file, or beyond what
            any model has.
    """
    with open_file(path) as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header = Header(data)
    header.read()
    return header


def _at_most(what: str, found: int, most: int) -> None:
    if found > most:
        raise ValueError(f"it says that it has {found:,} {what}, over {most:,}")


def _format(kind: int) -> str:
    if kind not in _FORMATS:
        raise ValueError(f"it has a value of type {kind}, which GGUF has not")
    return _FORMATS[kind]
