"""Safetensors files: a folder of them with an index, or one alone."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from meshpar import InputError
from meshpar.errors import install_extra
from meshpar.foreign_files import (
    MOST_BYTES,
    error_reason,
    open_file,
    parse_json,
    read_text,
)

WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"
_DTYPES = ("F32", "BF16", "F16", "F64")


class SafetensorsFolder:
    """Tensors of a folder as `transformers` writes it.

    A part is read without the rest of its tensor.

    Args:
        path: The folder, or one file.

    Raises:
        InputError: There is no such file, its index names one that is not there, or
            what is there is no safetensors.
    """

    def __init__(self, path: str | Path) -> None:
        self.where = str(path)
        self.bytes_read = 0
        self._open: dict[Path, Any] = {}
        self._files = _files(Path(path))
        self._file_of: dict[str, Path] = {}
        for file in self._files:
            for name in list(self._opened(file).keys()):
                if name in self._file_of:
                    raise InputError(
                        f"{name!r} is in {str(self._file_of[name])!r} and in "
                        f"{str(file)!r}: take one of the two away",
                        key="weights.tensor_twice",
                    )
                self._file_of[name] = file

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Raises:
            InputError: It is of a dtype that is no number of a weight, such as fp8.
        """
        found = self._slice(name)
        if found.get_dtype() not in _DTYPES:
            raise InputError(
                f"{name} in {self.where!r} is of dtype {found.get_dtype()}; known: "
                f"{', '.join(_DTYPES)}: take a copy that is not quantized",
                key="weights.unreadable_dtype",
            )
        return tuple(found.get_shape())

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """The values of a part of one tensor, a slice for each dim."""
        found = self._slice(name)
        # No dim to slice: a scalar.
        values = np.asarray(found[part] if part else found[...])
        self.bytes_read += values.nbytes
        return values

    def _slice(self, name: str) -> Any:
        return self._opened(self._file_of[name]).get_slice(name)

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            safetensors = _library()
            _check_header(file)
            try:
                self._open[file] = safetensors.safe_open(file, framework="numpy")
            except (OSError, safetensors.SafetensorError) as error:
                raise InputError(
                    f"cannot read {str(file)!r}: {error}", key="weights.unreadable_file"
                ) from error
        return self._open[file]


def _check_header(file: Path) -> None:
    """Refuse a header that would fill the memory; the library takes up to 100 MB.

    Raises:
        InputError: The file cannot be opened, or its header is too large.
    """
    try:
        with open_file(file) as opened:
            size = int.from_bytes(opened.read(8), "little")
        if size > MOST_BYTES:
            raise ValueError(f"its header has {size:,} bytes, over {MOST_BYTES:,}")
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {str(file)!r}: {error_reason(error)}",
            key="weights.unreadable_file",
        ) from error


def _library() -> Any:
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise InputError(
            f"reading safetensors needs safetensors: {install_extra('convert')}",
            key="weights.missing_package",
        ) from error
    return safetensors


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / INDEX
    if not index.is_file():
        if (path / WHOLE).is_file():
            return [path / WHOLE]
        raise InputError(
            f"no {WHOLE} and no {INDEX} in {str(path)!r}; name a folder that holds one",
            key="weights.no_safetensors",
        )
    named = _named_in(index)
    if (path / WHOLE).is_file() and WHOLE not in named:
        raise InputError(
            f"{str(path)!r} has two sets of weights, {WHOLE} and the files that "
            f"{INDEX} names: name the file that is meant, or take one of the two away",
            key="weights.two_sets",
        )
    for name in named:
        if not (path / name).is_file():
            raise InputError(
                f"{str(index)!r} names {name!r}, which is not there; fetch it, too",
                key="weights.missing_shard",
            )
    return [path / name for name in sorted(named)]


def _named_in(index: Path) -> set[str]:
    """Return the files that an index names, all in its own folder."""
    text = read_text(index, key="weights.unreadable_file")
    try:
        found = parse_json(text)
    except ValueError as error:
        raise InputError(
            f"{str(index)!r} has no weight_map: it is no JSON: {error}",
            key="weights.no_weight_map",
        ) from error
    files = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not files:
        raise InputError(
            f"{str(index)!r} has no weight_map: an object that names a file for each "
            "tensor; fetch it again",
            key="weights.no_weight_map",
        )
    for name in files.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(
                f"{str(index)!r} names {name!r}, which is no file of its own folder: "
                "files of weights lie beside their index",
                key="weights.file_outside_folder",
            )
    return set(files.values())
