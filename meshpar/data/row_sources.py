"""Rows of tokens to train on, each readable by its number alone."""

from __future__ import annotations

import numpy as np

from meshpar.data.errors import DataError
from meshpar.data.packing import Packing
from meshpar.data.token_stream import TokenStream

Row = dict[str, np.ndarray]
"""Arrays by the names of a language model's inputs, (seq,) each."""

_PADDING = -1
"""The number of the document of a place without a token."""


def check_row(stream: TokenStream, seq: int) -> None:
    """Refuses what has no row.

    Raises:
        DataError: There are too few tokens for one.
    """
    if stream.num_tokens < seq + 1:
        names = ", ".join(str(file.path) for file in stream.files[:3])
        raise DataError(
            f"{stream.num_tokens} tokens of {names} are too few for one row of "
            f"{seq} and its successor; give more data or a smaller --seq",
            key="data.too_few_tokens",
        )


class StreamRows:
    """Windows of `seq` tokens and their successors, across the ends of documents.

    Args:
        stream: What to read.
        seq: Tokens of a row.

    Raises:
        DataError: There are too few tokens for one row.
    """

    def __init__(self, stream: TokenStream, seq: int) -> None:
        check_row(stream, seq)
        self._stream, self._seq = stream, seq

    def __len__(self) -> int:
        return (self._stream.num_tokens - 1) // self._seq

    def __getitem__(self, index: int) -> Row:
        """Tokens, successors and weights of one row."""
        start = self._stream.start + int(index) * self._seq
        tokens = self._stream.read(start, start + self._seq + 1)
        weights = np.ones(self._seq, np.float32)
        return {"tokens": tokens[:-1], "targets": tokens[1:], "weights": weights}


class PackedRows:
    """Whole documents in each row, which do not see one another.

    A row has `positions`, counted from the beginning of each piece, and `segment_ids`,
    the number of the piece in the row, -1 where there is none. The last token of a
    document has no successor, and weighs nothing; a place without a token neither.

    Args:
        stream: What to read.
        packing: Which pieces make up which row.
    """

    def __init__(self, stream: TokenStream, packing: Packing) -> None:
        self._stream, self.packing = stream, packing

    def __len__(self) -> int:
        return self.packing.num_rows

    def __getitem__(self, index: int) -> Row:
        """Tokens, successors, weights, positions and segment ids of one row."""
        packing, seq = self.packing, self.packing.seq
        tokens, targets, positions = np.zeros((3, seq), np.int32)
        segments, weights = np.full(seq, _PADDING, np.int32), np.zeros(seq, np.float32)
        place, first = 0, int(packing.row_bounds[index])
        for piece in range(first, int(packing.row_bounds[index + 1])):
            start, length = int(packing.starts[piece]), int(packing.lengths[piece])
            followed = 0 if packing.ends_document[piece] else 1
            read = self._stream.read(start, start + length + followed)
            here = slice(place, place + length)
            with_target = slice(place, place + length - 1 + followed)
            tokens[here], targets[with_target] = read[:length], read[1:]
            weights[with_target] = 1
            positions[here] = np.arange(length)
            segments[here] = piece - first
            place += length
        return {
            "tokens": tokens,
            "targets": targets,
            "weights": weights,
            "positions": positions,
            "segment_ids": segments,
        }
