"""Megatron-LM's indexed datasets: tokens in NAME.bin, lengths in NAME.idx.

The index (Megatron Core, `datasets/indexed_dataset.py`): `MMIDIDX` and two zeros,
version 1 in 8 bytes, a code of the tokens' type in one, the number of sequences in 8,
the number of documents + 1 in 8; then each sequence's length in 4 bytes, its first byte
in 8, and the first sequence of each document in 8. Little-endian.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import secrets
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from meshpar.data.token_files import TokenFile, file_size
from meshpar.errors import DataError

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {np.dtype(text): code for code, text in _DTYPES.items()}
_MOST_TOKENS = np.iinfo(np.int32).max  # of a sequence, whose length has 4 bytes
_NOT_TOKENS = {6: "float64", 7: "float32"}


def read_megatron(path: Path) -> TokenFile:
    """Open the tokens of NAME.bin with the documents of NAME.idx.

    Args:
        path: Either file.

    Raises:
        DataError: A file is missing or cut off, or the two disagree.
    """
    index, tokens = path.with_suffix(".idx"), path.with_suffix(".bin")
    size = file_size(index)
    content = index.read_bytes()
    dtype, lengths, pointers, documents = _parse_index(index, content, size)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if not np.array_equal(pointers, starts[:-1] * dtype.itemsize):
        at = int(np.argmax(pointers != starts[:-1] * dtype.itemsize))
        raise DataError(
            f"{str(index)!r}: sequence {at} begins at byte {pointers[at]} of the "
            f"tokens, not where the one before ends, {starts[at] * dtype.itemsize}; "
            "merge the files anew, one after another",
            key="data.sequences_not_adjacent",
        )
    file_bytes, needed = file_size(tokens), int(starts[-1]) * dtype.itemsize
    if file_bytes < needed:
        raise DataError(
            f"{str(tokens)!r} has {file_bytes} bytes, but its .idx speaks of "
            f"{starts[-1]} tokens of {dtype.itemsize} bytes, {needed}: it is cut off; "
            "copy it again",
            key="data.cut_off_tokens",
        )
    return TokenFile(
        path=tokens,
        dtype=dtype,
        start_byte=0,
        bounds=starts[documents],
        file_bytes=file_bytes,
    )


def _parse_index(
    index: Path, content: bytes, size: int
) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens' type, sequences' lengths and first bytes, and documents."""
    name = repr(str(index))
    if size < _HEADER.size or not content.startswith(_MAGIC):
        raise DataError(
            f"{name} is no index of Megatron: it does not begin with {_MAGIC!r}; name "
            "the .bin of a pair that preprocess_data.py wrote",
            key="data.not_megatron_index",
        )
    _, version, code, num_sequences, num_bounds = _HEADER.unpack_from(content)
    if version != 1:
        raise DataError(
            f"{name} has version {version}; only version 1 is known",
            key="data.unknown_version",
        )
    if code not in _DTYPES:
        kind = _NOT_TOKENS.get(code, "unknown")
        raise DataError(
            f"{name}: its numbers are of type {code} ({kind}), which are no tokens; "
            f"known: {', '.join(f'{one} {text[1:]}' for one, text in _DTYPES.items())}",
            key="data.unknown_token_type",
        )
    needed = _HEADER.size + num_sequences * 12 + num_bounds * 8
    if size < needed:
        raise DataError(
            f"{name} has {size} bytes, but {num_sequences} sequences and "
            f"{num_bounds - 1} documents need {needed}: it is cut off; copy it again",
            key="data.cut_off_index",
        )
    place = _HEADER.size
    lengths = np.frombuffer(content, "<i4", num_sequences, place)
    pointers = np.frombuffer(content, "<i8", num_sequences, place + 4 * num_sequences)
    documents = np.frombuffer(content, "<i8", num_bounds, place + 12 * num_sequences)
    in_order = len(documents) and documents[0] == 0 and (np.diff(documents) >= 0).all()
    if not in_order or documents[-1] != num_sequences or (lengths < 0).any():
        raise DataError(
            f"{name}: its documents do not go in order from sequence 0 to "
            f"{num_sequences}; write it anew",
            key="data.documents_out_of_order",
        )
    return np.dtype(_DTYPES[code]), lengths, pointers, documents


class MegatronWriter:
    """Writer of documents, one sequence each, as NAME.bin and NAME.idx.

    Both files appear when the `with` block ends without an error, the index last; of
    two writers of the same files the later one's stay.

    Args:
        path: NAME.bin.
        dtype: Type of the tokens, one that the format has.
        source: File that the documents are from, for messages; None for `path`.
    """

    def __init__(self, path: Path, dtype: np.dtype, source: Path | None = None) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        self._source = source or path
        self._code = _CODES[self.dtype]
        self._lengths: list[int] = []
        self._unfinished = path.with_suffix(f".{secrets.token_hex(4)}.unfinished")

    def add(self, tokens: np.ndarray) -> None:
        """Add a document.

        Raises:
            DataError: It is longer than the index can express.
        """
        if len(tokens) > _MOST_TOKENS:
            raise DataError(
                f"document {len(self._lengths)} of {str(self._source)!r} has "
                f"{len(tokens)} tokens, but the format takes {_MOST_TOKENS}; cut it in "
                "several",
                key="data.document_too_long",
            )
        self._file.write(np.asarray(tokens).astype(self.dtype).tobytes())
        self._lengths.append(len(tokens))

    def __enter__(self) -> MegatronWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        self._file = open(self._unfinished, "wb")  # noqa: SIM115
        _try_lock(self._file)  # Until it is closed, or this process killed.
        return self

    def _remove_leftovers(self) -> None:
        """Remove files that killed writers of the same files left."""
        pattern = f"{glob.escape(self.path.stem)}.*.unfinished"
        for left in self.path.parent.glob(pattern):
            with contextlib.suppress(OSError), open(left, "rb") as file:
                if _try_lock(file):
                    left.unlink()
                    left.with_suffix(".idx-unfinished").unlink(missing_ok=True)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            with self._file:
                self._file.flush()
                if error is None:
                    self._finish()
        finally:  # A finished file has another name.
            self._unfinished.unlink(missing_ok=True)
            self._unfinished_index.unlink(missing_ok=True)

    @property
    def _unfinished_index(self) -> Path:
        return self._unfinished.with_suffix(".idx-unfinished")

    def _finish(self) -> None:
        lengths = np.array(self._lengths, "<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
        pointers = ends - lengths.astype("<i8") * self.dtype.itemsize
        count = len(lengths)
        header = _HEADER.pack(_MAGIC, 1, self._code, count, count + 1)
        arrays = lengths, pointers.astype("<i8"), np.arange(count + 1, dtype="<i8")
        index = self._unfinished_index
        index.write_bytes(header + b"".join(array.tobytes() for array in arrays))
        self._unfinished.replace(self.path)
        index.replace(self.path.with_suffix(".idx"))


def _try_lock(file: BinaryIO) -> bool:
    """Lock a file for this process; return False if another holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
