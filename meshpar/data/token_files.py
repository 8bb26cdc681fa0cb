"""Tokens on disk: files, nanoGPT's among them, and the documents of several files."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from meshpar.errors import DataError, renamed
from meshpar.foreign_files import open_file

_SCANNED_BYTES = 1 << 30
"""Most bytes of a file that are checked for tokens outside the vocabulary."""

_SCANNED_AT_ONCE = 1 << 24  # tokens
_SUMMED = 1 << 20
"""Tokens at each end of a file that its checksum covers."""

_HEADER_BYTES = 256 * 4
_WITH_HEADER = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
_LOOKED_AT, _FEWEST = 1 << 18, 8
"""Bytes that tell the size of a token, and fewest pairs of tokens that decide."""
_MOST_HIGH = 15
"""Most of the upper half of a token of four bytes, with fewer than a million."""
_OTHERS = {
    b"\x93NUMPY": "NumPy's .npy",
    b"PK\x03\x04": "a zip archive, such as .npz,",
    b"PAR1": "Parquet",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """Tokens one after another in a file, and the bounds of their documents.

    Args:
        path: The file.
        dtype: Type of its numbers, little-endian.
        start_byte: Place of the first token.
        bounds: (number of documents + 1,) first token of each document, and the number
            of tokens at the end.
        file_bytes: Size of the file when it was opened.
    """

    path: Path
    dtype: np.dtype
    start_byte: int
    bounds: np.ndarray
    file_bytes: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return int(self.bounds[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens `start` to `stop`, of the file's type.

        The file is opened each time, so that one cut off, replaced or gone is an error;
        mapped memory would end the process or give old content.

        Raises:
            DataError: The file has changed since it was opened, or is gone.
        """
        size = self.dtype.itemsize
        try:
            with open(self.path, "rb", buffering=0) as file:
                file_bytes = os.fstat(file.fileno()).st_size
                if file_bytes != self.file_bytes:
                    raise DataError(
                        f"{str(self.path)!r} has changed: {file_bytes} bytes, "
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
        DataError: The file is missing, or a folder.
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


def read_nanogpt(path: Path, eos: int | None = None) -> TokenFile:
    """Open a flat file of tokens, NAME.bin alone: nanoGPT's, or llm.c's with a header.

    nanoGPT (`data/openwebtext/prepare.py`) writes uint16 and nothing else; a document's
    last token is the end of text. llm.c (`dev/data/data_common.py`) and modded-nanogpt
    begin with 256 int32: 20240520, 1 and the number of uint16 tokens, or 20240801, 7
    and the number of uint32 tokens; a document's *first* token is the end of text.

    Args:
        path: NAME.bin.
        eos: Token that cuts documents; the whole file is read for it once. None for one
            document.

    Raises:
        DataError: There is no such file, it is cut off or empty, or looks like one of
            another format, such as tokens of four bytes without a header.
    """
    file_bytes = file_size(path)
    with open(path, "rb") as file:
        head = np.frombuffer(file.read(12), np.dtype("<i4"), min(file_bytes, 12) // 4)
    magic = int(head[0]) if len(head) == 3 else 0
    has_header = magic in _WITH_HEADER and file_bytes >= _HEADER_BYTES
    if has_header:
        dtype, num_tokens = _read_header(path, magic, head[1:], file_bytes)
    else:
        _check_two_bytes(path)
        dtype, num_tokens = np.dtype("<u2"), file_bytes // 2
        if file_bytes % 2:
            raise DataError(
                f"{str(path)!r} has {file_bytes} bytes, which are no whole number of "
                "uint16 tokens: it is cut off, or of another format; copy it again",
                key="data.partial_token",
            )
    if not num_tokens:
        raise DataError(
            f"{str(path)!r} holds no token; leave it out", key="data.no_tokens"
        )
    whole = TokenFile(
        path=path,
        dtype=dtype,
        start_byte=_HEADER_BYTES if has_header else 0,
        bounds=np.array([0, num_tokens]),
        file_bytes=file_bytes,
    )
    if eos is None:
        return whole
    return replace(whole, bounds=_document_bounds(whole, eos, begins=has_header))


def _check_two_bytes(path: Path) -> None:
    """Refuse a file without a header whose first tokens are not of two bytes each."""
    with open(path, "rb") as file:
        head = file.read(_LOOKED_AT)
    for magic, name in _OTHERS.items():
        if head.startswith(magic):
            raise DataError(
                f"{str(path)!r} begins as {name} does, and is no flat file of uint16 "
                "tokens: write its tokens with .astype(numpy.uint16).tofile",
                key="data.other_format",
            )
    pairs = np.frombuffer(head, "<u2", len(head) // 4 * 2).reshape(-1, 2)
    if len(pairs) < _FEWEST or pairs[:, 1].max() > _MOST_HIGH:
        return
    if pairs[:, 0].max() > _MOST_HIGH:
        raise DataError(
            f"{str(path)!r} has numbers up to {pairs[:, 1].max()} in every other "
            "place, as tokens of 4 bytes would have, but without a header tokens are "
            "read as uint16: write them so, or with llm.c's header for uint32",
            key="data.tokens_of_four_bytes",
        )


def _read_header(
    path: Path, magic: int, rest: np.ndarray, file_bytes: int
) -> tuple[np.dtype, int]:
    version, num_tokens = map(int, rest)
    right, text = _WITH_HEADER[magic]
    if version != right:
        raise DataError(
            f"{str(path)!r}: version {version} of a header {magic}; only {right} is "
            "known",
            key="data.unknown_version",
        )
    if num_tokens < 0:
        raise DataError(
            f"{str(path)!r}: its header speaks of {num_tokens} tokens, which must be 1 "
            "or more; write the file anew",
            key="data.negative_token_count",
        )
    dtype = np.dtype(text)
    needed = _HEADER_BYTES + num_tokens * dtype.itemsize
    if file_bytes < needed:
        raise DataError(
            f"{str(path)!r} has {file_bytes} bytes, but its header speaks of "
            f"{num_tokens} tokens, {needed} bytes: it is cut off; copy it again",
            key="data.cut_off_tokens",
        )
    return dtype, num_tokens


def _document_bounds(file: TokenFile, eos: int, *, begins: bool) -> np.ndarray:
    """Return bounds of documents that begin, or end, with the token `eos`."""
    places = []
    for start in range(0, file.num_tokens, _SCANNED_AT_ONCE):
        tokens = file.read(start, min(start + _SCANNED_AT_ONCE, file.num_tokens))
        places.append(np.flatnonzero(tokens == eos) + start)
    cuts = np.concatenate(places) + (0 if begins else 1)
    return np.unique(np.concatenate([[0], cuts, [file.num_tokens]]))


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Tokens of files one after another, and the bounds of their documents.

    Args:
        files: In order.
        bounds: (number of documents + 1,) counted in tokens of all files.
        vocab: Size of the vocabulary, which every token must be below.
    """

    files: tuple[TokenFile, ...]
    bounds: np.ndarray
    vocab: int

    @classmethod
    def from_files(cls, files: Sequence[TokenFile], vocab: int) -> TokenStream:
        """Return all documents of the files."""
        starts = np.cumsum([0] + [file.num_tokens for file in files])
        parts = [
            file.bounds[:-1] + start
            for file, start in zip(files, starts[:-1], strict=True)
        ]
        bounds = np.concatenate([*parts, starts[-1:]]).astype(np.int64)
        return cls(tuple(files), bounds, vocab)

    of = classmethod(renamed("TokenStream.of", from_files.__func__))  # type: ignore

    @property
    def start(self) -> int:
        """Number of the first token."""
        return int(self.bounds[0])

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return int(self.bounds[-1] - self.bounds[0])

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.bounds) - 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens `start` to `stop`, (stop - start,) int32.

        Raises:
            DataError: A file has changed, or a token is outside the vocabulary.
        """
        parts = []
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            file, first = self.files[number], int(self._starts[number])
            end = min(stop, first + file.num_tokens)
            if start < end:
                parts.append(self._read_checked(file, start - first, end - first))
            start, number = max(start, end), number + 1
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, _NO_TOKENS])

    def check_vocab(self) -> None:
        """Check the tokens of the first GiB of each file.

        Raises:
            DataError: A token is outside the vocabulary.
        """
        for file in self.files:
            if np.iinfo(file.dtype).max < self.vocab and np.iinfo(file.dtype).min == 0:
                continue
            most = min(file.num_tokens, _SCANNED_BYTES // file.dtype.itemsize)
            for start in range(0, most, _SCANNED_AT_ONCE):
                self._read_checked(file, start, min(start + _SCANNED_AT_ONCE, most))

    def split(self, held_out: int) -> tuple[TokenStream, TokenStream]:
        """Split off whole documents of about `held_out` tokens at the end.

        If no document ends near there, as in a single text, it is cut in two.
        """
        cut = int(self.bounds[-1]) - held_out
        nearest = int(np.argmin(np.abs(self.bounds - cut)))
        end = int(self.bounds[nearest])
        if nearest in (0, len(self.bounds) - 1) or abs(end - cut) > held_out // 2:
            nearest = int(np.searchsorted(self.bounds, cut))
            bounds = np.insert(self.bounds, nearest, cut)
        else:
            bounds = self.bounds
        return (
            TokenStream(self.files, bounds[: nearest + 1], self.vocab),
            TokenStream(self.files, bounds[nearest:], self.vocab),
        )

    @property
    def fingerprint(self) -> str:
        """Size, and checksum of documents' bounds and of both ends of each file."""
        checksum = zlib.crc32(self.bounds.astype("<i8").tobytes())
        for file in self.files:
            most = min(_SUMMED, file.num_tokens)
            for start in sorted({0, file.num_tokens - most}):
                checksum = zlib.crc32(
                    file.read(start, start + most).tobytes(), checksum
                )
        return f"{self.num_tokens} tokens, crc32 {checksum:08x}"

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum([0] + [file.num_tokens for file in self.files])

    def _read_checked(self, file: TokenFile, start: int, stop: int) -> np.ndarray:
        tokens = file.read(start, stop)
        most, least = tokens.max(initial=0), tokens.min(initial=0)
        if most >= self.vocab or least < 0:
            wrong = int(np.argmax((tokens >= self.vocab) | (tokens < 0)))
            raise DataError(
                f"{str(file.path)!r}: token {start + wrong} is {tokens[wrong]}, but "
                f"the model's vocabulary is {self.vocab}; give a model that has "
                f"{max(int(most), 0) + 1} or more, such as by --preset and --model "
                "vocab=N",
                key="data.token_outside_vocabulary",
            )
        return tokens.astype(np.int32)


_NO_TOKENS = np.zeros(0, np.int32)
