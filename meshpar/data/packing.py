"""Whole documents side by side in rows of one length, none lost.

Grain's own packers are iterators: their row k needs every row before it, so that each
host would read the data of all. Here the places are computed once, from lengths alone;
then any row can be read by itself.

Reference: Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (best fit,
longest first); Johnson 1973 for its bound, 11/9 of the fewest rows + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Which pieces of documents lie in which row.

    Args:
        seq: Tokens of a row.
        row_bounds: (number of rows + 1,) the first piece of each row.
        starts: First token of each piece, in order of rows.
        lengths: Tokens of each piece.
        ends_document: Whether each piece is the last of its document, whose last token
            has no successor.
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
        """Rows in all."""
        return len(self.row_bounds) - 1

    @property
    def num_targets(self) -> int:
        """Tokens with a successor in their document."""
        return int(self.lengths.sum() - np.count_nonzero(self.ends_document))

    @property
    def filled(self) -> float:
        """The share of all places in rows that hold a token."""
        return float(self.lengths.sum() / max(self.num_rows * self.seq, 1))


def packed(bounds: np.ndarray, seq: int) -> Packing:
    """The rows of documents, each piece put where the least room stays free.

    A document longer than `seq` is cut into rows of its own and a rest; all others stay
    whole. Documents without a token are left out.

    Args:
        bounds: (number of documents + 1,) the first token of each, and the end.
        seq: Tokens of a row.

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
    row_of = _rows_of(piece_lengths, seq)
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


def _rows_of(lengths: np.ndarray, seq: int) -> np.ndarray:
    """The row of each piece: longest first, all of one length at a time."""
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
