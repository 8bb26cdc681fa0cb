"""A GGUF file: tensors that may be quantized, and what it says of its model."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from meshpar import InputError
from meshpar.errors import install_extra
from meshpar.foreign_files import error_reason
from meshpar.models.convert.gguf_header import Header, read_header

_BROKEN = (OSError, ValueError, LookupError, TypeError, OverflowError)
"""Errors that a file whose numbers contradict one another leads to."""


class GGUFFile:
    """Tensors of a GGUF file, made numbers by the `gguf` package as they are read.

    Rows are read without the others; of a row all is.

    Args:
        path: The file.

    Raises:
        InputError: It cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.where = str(path)
        self.bytes_read = 0
        self._gguf = _library()
        try:
            self._header = read_header(path)
            self._tensors = self._stored_tensors(self._header)
        except _BROKEN as error:
            raise InputError(
                f"cannot read {str(path)!r}: {error_reason(error)}",
                key="weights.unreadable_file",
            ) from error

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    @property
    def keys(self) -> Collection[str]:
        """The keys of its metadata."""
        return self._header.values.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in NumPy's order.

        Raises:
            InputError: There is none of that name.
        """
        if name not in self._tensors:
            raise InputError(
                f"{self.where!r} has no {name!r}: it is cut off, or no language model",
                key="weights.missing_tensor",
            )
        return self._header.tensors[name].shape

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """Values of a part of one tensor, a slice for each dim: fp16 or fp32."""
        kind, stored = self._tensors[name]
        # Of one dim all is read: it may be quantized.
        rows, cut = stored, part
        if len(part) > 1:
            rows, cut = stored[part[0]], (slice(None), *part[1:])
        self.bytes_read += rows.nbytes
        if kind == self._gguf.GGMLQuantizationType.F16:
            # Converted where it is copied to, instead of in a copy of its own.
            return rows.view(np.float16)[cut]
        return self._gguf.dequantize(rows, kind)[cut]

    def metadata(self, key: str, default: Any = None) -> Any:
        """The value of a key of its metadata; `default` if it has no such key.

        Raises:
            InputError: It has a value that cannot be read, such as a broken text.
        """
        value = self._header.values.get(key, default)
        try:
            if isinstance(value, bytes):
                return value.decode()
            if isinstance(value, list):
                return [x.decode() if isinstance(x, bytes) else x for x in value]
            return value
        except _BROKEN as error:
            raise InputError(
                f"cannot read {key} of {self.where!r}: {error_reason(error)}",
                key="weights.unreadable_file",
            ) from error

    def _stored_tensors(self, header: Header) -> dict[str, tuple[Any, np.ndarray]]:
        """Return the type of every tensor, and its bytes: a row for all dims but one.

        Raises:
            ValueError: The file ends before a tensor, or a type is unknown.
        """
        data, first = np.frombuffer(header.data, np.uint8), header.first_byte
        found = {}
        for name, entry in header.tensors.items():
            kind = self._gguf.GGMLQuantizationType(entry.kind)
            shape = self._gguf.quant_shape_to_byte_shape(entry.shape or (1,), kind)
            start = first + entry.offset
            stored = data[start : start + math.prod(shape)]
            if stored.size < math.prod(shape):
                raise ValueError(f"it is cut off in {name!r}; copy it again")
            found[name] = kind, stored.reshape(shape)
        return found


def _library() -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise InputError(
            f"reading GGUF needs gguf: {install_extra('convert')}",
            key="weights.missing_package",
        ) from error
    return gguf
