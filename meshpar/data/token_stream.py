"""The documents of several files, one after another."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshpar.data.errors import DataError
from meshpar.data.token_file import TokenFile

_SCANNED_BYTES = 1 << 30
"""Of a file, looked through for tokens outside the vocabulary when a run begins."""

_SCANNED_AT_ONCE = 1 << 24  # tokens
_SUMMED = 1 << 20
"""Tokens at each end of a file that its checksum is of."""


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Tokens of files one after another, and the bounds of their documents.

    Args:
        files: In order.
        bounds: (number of documents + 1,) counted in tokens of all files.
        vocab: Every token has to be below it.
    """

    files: tuple[TokenFile, ...]
    bounds: np.ndarray
    vocab: int

    @classmethod
    def of(cls, files: Sequence[TokenFile], vocab: int) -> TokenStream:
        """All documents of the files."""
        starts = np.cumsum([0] + [file.num_tokens for file in files])
        parts = [
            file.bounds[:-1] + start
            for file, start in zip(files, starts[:-1], strict=True)
        ]
        bounds = np.concatenate([*parts, starts[-1:]]).astype(np.int64)
        return cls(tuple(files), bounds, vocab)

    @property
    def start(self) -> int:
        """The first token."""
        return int(self.bounds[0])

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.bounds[-1] - self.bounds[0])

    @property
    def num_documents(self) -> int:
        """Documents, those without a token among them."""
        return len(self.bounds) - 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop`, (stop - start,) int32.

        Raises:
            DataError: A file has changed, or a token is outside the vocabulary.
        """
        parts = []
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            file, first = self.files[number], int(self._starts[number])
            end = min(stop, first + file.num_tokens)
            if start < end:
                parts.append(self._read_of(file, start - first, end - first))
            start, number = max(start, end), number + 1
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, _NO_TOKENS])

    def check_vocab(self) -> None:
        """Looks through the files, the first GiB of each, for tokens outside it.

        Raises:
            DataError: There is one.
        """
        for file in self.files:
            if np.iinfo(file.dtype).max < self.vocab and np.iinfo(file.dtype).min == 0:
                continue
            most = min(file.num_tokens, _SCANNED_BYTES // file.dtype.itemsize)
            for start in range(0, most, _SCANNED_AT_ONCE):
                self._read_of(file, start, min(start + _SCANNED_AT_ONCE, most))

    def split(self, held_out: int) -> tuple[TokenStream, TokenStream]:
        """All but the end, and the end: whole documents of about `held_out` tokens.

        Where no document ends near there, as in a single text, it is cut in two.
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
        """Size and checksum: of documents' bounds, and of both ends of each file."""
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

    def _read_of(self, file: TokenFile, start: int, stop: int) -> np.ndarray:
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
