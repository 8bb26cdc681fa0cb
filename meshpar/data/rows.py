"""Rows of tokens, each readable by its number: windows, or packed whole documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshpar.data.errors import DataError
from meshpar.data.token_files import TokenStream

Row = dict[str, np.ndarray]
"""Name of a language model's input -> its (seq,) array."""

_PADDING = -1
"""Segment of a place without a token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Pieces of documents in each row.

    Args:
        seq: Tokens of a row.
        row_bounds: (number of rows + 1,) first piece of each row.
        starts: First token of each piece, in order of rows.
        lengths: Tokens of each piece.
        ends_document: True for the last piece of a document, whose last token has no
            successor.
        num_cut: Documents longer than a row, cut into pieces.
    """

    seq: int
    row_bounds: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    ends_document: np.ndarray
    num_cut: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.row_bounds) - 1

    @property
    def num_targets(self) -> int:
        """Number of tokens with a successor in their document."""
        return int(self.lengths.sum() - np.count_nonzero(self.ends_document))

    @property
    def filled(self) -> float:
        """Fraction of the places in rows that hold a token."""
        return float(self.lengths.sum() / max(self.num_rows * self.seq, 1))


def packed(bounds: np.ndarray, seq: int) -> Packing:
    """Pack documents into rows, each piece where the least room stays free.

    A document longer than `seq` is cut into rows of its own and a rest; all others stay
    whole. Empty documents are left out.

    Grain's own packers are iterators: their row k needs every row before it, so that
    each host would read the data of all. Here places follow from lengths alone, and any
    row can be read by itself.

    Args:
        bounds: (number of documents + 1,) first token of each, and the end.
        seq: Tokens of a row.

    Reference: Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (best
    fit, longest first); Johnson 1973 for its bound, 11/9 of the fewest rows + 1.

    Example:
        >>> rows = packed(np.array([0, 2, 5, 9]), seq=5)
        >>> rows.starts, rows.lengths, rows.row_bounds
        (array([5, 0, 2]), array([4, 2, 3]), array([0, 1, 3]))
    """
    lengths = np.diff(bounds)
    counts = -(-lengths // seq)
    document = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = bounds[document] + number * seq
    ends = bounds[document + 1]
    piece_lengths = np.minimum(ends - starts, seq)
    row_of = _place_pieces(piece_lengths, seq)
    order = np.argsort(row_of, kind="stable")
    num_rows = int(row_of.max(initial=-1)) + 1
    return Packing(
        seq=seq,
        row_bounds=np.searchsorted(row_of[order], np.arange(num_rows + 1)),
        starts=starts[order],
        lengths=piece_lengths[order],
        ends_document=(starts + piece_lengths == ends)[order],
        num_cut=int((counts > 1).sum()),
    )


def _place_pieces(lengths: np.ndarray, seq: int) -> np.ndarray:
    """Return the row of each piece: longest first, all of one length at a time."""
    row_of = np.zeros(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    firsts = np.flatnonzero(np.diff(lengths[by_length], prepend=-1))
    rows_with: dict[int, np.ndarray] = {}  # Free tokens -> rows that have as many.
    num_free = np.zeros(seq + 1, np.int64)  # How many rows those are.
    num_rows = 0
    for pieces in np.split(by_length, firsts[1:]) if len(lengths) else ():
        length = int(lengths[pieces[0]])
        while len(pieces):
            free = length + int(np.argmax(num_free[length:] > 0))
            if not num_free[free]:
                new = -(-len(pieces) // (seq // length))
                rows_with[seq] = np.arange(num_rows, num_rows + new)
                num_free[seq], num_rows, free = new, num_rows + new, seq
            rows, rest = np.split(rows_with[free], [len(pieces)])
            row_of[pieces[: len(rows)]] = rows
            pieces = pieces[len(rows) :]
            rows_with[free], num_free[free] = rest, len(rest)
            left = free - length
            rows_with[left] = np.concatenate([rows_with.get(left, rows[:0]), rows])
            num_free[left] = len(rows_with[left])
    return row_of


def check_row(stream: TokenStream, seq: int) -> None:
    """Check that a stream has tokens for one row.

    Raises:
        DataError: There are too few.
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
        stream: Tokens.
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
        """Return tokens, successors and weights of one row."""
        start = self._stream.start + int(index) * self._seq
        tokens = self._stream.read(start, start + self._seq + 1)
        weights = np.ones(self._seq, np.float32)
        return {"tokens": tokens[:-1], "targets": tokens[1:], "weights": weights}


class PackedRows:
    """Rows of whole documents that do not see one another.

    A row has `positions`, counted from the beginning of each piece, and `segment_ids`,
    the number of the piece in the row, -1 in empty places. A document's last token,
    which has no successor, and empty places have weight 0.

    Args:
        stream: Tokens.
        packing: Pieces of each row.
    """

    def __init__(self, stream: TokenStream, packing: Packing) -> None:
        self._stream, self.packing = stream, packing

    def __len__(self) -> int:
        return self.packing.num_rows

    def __getitem__(self, index: int) -> Row:
        """Return tokens, successors, weights, positions and segment ids of a row."""
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
