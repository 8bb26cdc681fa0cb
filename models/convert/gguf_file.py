"""A GGUF file: tensors that may be quantized, and what it says of its model."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from meshpar import InputError
from meshpar.errors import install_extra
from meshpar.foreign_files import error_reason
from meshpar.models.convert.gguf_header import check_header

_BROKEN = (OSError, ValueError, LookupError, TypeError, OverflowError)
"""Errors that `gguf` raises for a file whose numbers contradict one another."""


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
            check_header(path)
            self._reader = self._gguf.GGUFReader(path)
        except _BROKEN as error:
            raise InputError(
                f"cannot read {str(path)!r}: {error_reason(error)}",
                key="weights.unreadable_file",
            ) from error
        self._tensors = {one.name: one for one in self._reader.tensors}

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    @property
    def keys(self) -> Collection[str]:
        """The keys of its metadata."""
        return self._reader.fields.keys()

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
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """fp32 values of a part of one tensor, a slice for each dim."""
        tensor = self._tensors[name]
        rows = tensor.data[part[0]]
        self.bytes_read += rows.nbytes
        values = self._gguf.dequantize(rows, tensor.tensor_type)
        return values[(slice(None), *part[1:])]

    def metadata(self, key: str, default: Any = None) -> Any:
        """The value of a key of its metadata; `default` if it has no such key.

        Raises:
            InputError: It has a value that cannot be read, such as a broken text.
        """
        field = self._reader.get_field(key)
        try:
            return default if field is None else field.contents()
        except _BROKEN as error:
            raise InputError(
                f"cannot read {key} of {self.where!r}: {error_reason(error)}",
                key="weights.unreadable_file",
            ) from error


def _library() -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise InputError(
            f"reading GGUF needs gguf: {install_extra('convert')}",
            key="weights.missing_package",
        ) from error
    return gguf
