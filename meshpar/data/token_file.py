"""A file of tokens on disk, read piece by piece."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshpar.data.errors import DataError
from meshpar.foreign_files import open_file


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """Tokens one after another in a file, and where documents begin among them.

    Args:
        path: The file.
        dtype: Of its numbers, little-endian.
        start_byte: Where the first token lies.
        bounds: (number of documents + 1,) the first token of each document, and the
            number of tokens at the end.
        file_bytes: Its size; with another the file is no longer what was opened.
    """

    path: Path
    dtype: np.dtype
    start_byte: int
    bounds: np.ndarray
    file_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.bounds[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop`, as the file has them.

        The file is opened each time: one that is cut off, replaced or gone is then an
        error, where a mapping of its memory would end the process or read on in what
        is no longer there.

        Raises:
            DataError: It is not as it was when the run began.
        """
        size = self.dtype.itemsize
        try:
            with open(self.path, "rb", buffering=0) as file:
                found = os.fstat(file.fileno()).st_size
                if found != self.file_bytes:
                    raise DataError(
                        f"{str(self.path)!r} has changed: {found} bytes, "
                        f"{self.file_bytes} when it was opened; put it back and go on "
                        "with --resume",
                        key="data.changed_file",
                    )
                file.seek(self.start_byte + start * size)
                content = file.read((stop - start) * size)
        except OSError as error:
            raise DataError(
                f"cannot read {str(self.path)!r} any more: {error.strerror}; put it "
                "back and go on with --resume",
                key="data.lost_file",
            ) from error
        return np.frombuffer(content, self.dtype)


def file_size(path: Path) -> int:
    """Bytes of a file.

    Raises:
        DataError: It is not there, or it is none.
    """
    try:
        if path.is_dir():
            raise DataError(
                f"{str(path)!r} is a folder; name a file", key="data.folder_not_file"
            )
        with open_file(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(
            f"cannot read {str(path)!r}: {error.strerror}", key="data.unreadable_file"
        ) from error
