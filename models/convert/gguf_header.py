"""The header of a GGUF file, walked before the `gguf` package reads it.

The package believes every count in a file: one of 2^60 keeps it busy for ever. Here a
count is held against the bytes that are left.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from meshpar.foreign_files import open_file

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type of a value, as `gguf.GGUFValueType` numbers it -> bytes."""

_MOST_VALUES = 1 << 22
"""In all lists of a file. The package takes half a kilobyte for each; Gemma 3's files
have 1,300,000."""
_MOST_FIELDS = 1 << 16
"""Values, and tensors, that have a name."""
_MOST_NAME_BYTES = 1 << 16
_MOST_TEXT_BYTES = 1 << 24
_MOST_DIMS = 8


def check_header(path: str | Path) -> None:
    """Pass a file whose header ends within it.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is no GGUF, or a count in it is beyond the file, or beyond what
            any model has.
    """
    with open_file(path) as file:
        header = _Header(file, os.fstat(file.fileno()).st_size)
        header.check()


@dataclass
class _Header:
    file: IO[bytes]
    file_bytes: int
    order: str = "<"
    num_values: int = 0

    def check(self) -> None:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin as GGUF does")
        version = self._number("I")
        if not version & 0xFFFF:  # Written on a machine of the other byte order.
            self.order = ">"
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in _VERSIONS:
            raise ValueError(f"it is of version {version}; known: 2 and 3")
        tensors, values = self._number("Q"), self._number("Q")
        self._at_most("named values", values, _MOST_FIELDS)
        self._at_most("tensors", tensors, _MOST_FIELDS)
        for _ in range(values):
            self._text(_MOST_NAME_BYTES)
            self._value(self._number("I"))
        for _ in range(tensors):
            self._text(_MOST_NAME_BYTES)
            self._tensor()

    def _tensor(self) -> None:
        dims = self._number("I")
        self._at_most("dims of a tensor", dims, _MOST_DIMS)
        size = math.prod(self._number("Q") for _ in range(dims))
        self._number("I")  # Its type.
        self._at_most("values of a tensor", size, 8 * self.file_bytes)
        self._at_most("bytes before a tensor", self._number("Q"), self.file_bytes)

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._text(_MOST_TEXT_BYTES)
        elif kind == _ARRAY:
            self._list()
        else:
            self._skip(_value_bytes(kind))

    def _list(self) -> None:
        kind, count = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            raise ValueError("it has a list of lists")
        self.num_values += count
        self._at_most("values of lists", self.num_values, _MOST_VALUES)
        if kind == _STRING:
            for _ in range(count):
                self._text(_MOST_TEXT_BYTES)
        else:
            self._skip(count * _value_bytes(kind))

    def _text(self, most: int) -> None:
        size = self._number("Q")
        self._at_most("bytes of a text", size, most)
        self._skip(size)

    def _number(self, kind: str) -> int:
        size = struct.calcsize(kind)
        return int(struct.unpack(self.order + kind, self._take(size))[0])

    def _take(self, size: int) -> bytes:
        found = self.file.read(size)
        if len(found) < size:
            raise ValueError("it is cut off in its header; copy it again")
        return found

    def _skip(self, size: int) -> None:
        if self.file.tell() + size > self.file_bytes:
            raise ValueError("it is cut off in its header; copy it again")
        self.file.seek(size, os.SEEK_CUR)

    def _at_most(self, what: str, found: int, most: int) -> None:
        if found > most:
            raise ValueError(f"it says that it has {found:,} {what}, over {most:,}")


def _value_bytes(kind: int) -> int:
    if kind not in _SCALAR_BYTES:
        raise ValueError(f"it has a value of type {kind}, which GGUF has not")
    return _SCALAR_BYTES[kind]
