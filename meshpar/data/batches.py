"""Rows of tokens, and batches of them on the devices ahead of their step.

Rows are windows or packed whole documents, each readable by its number. Grain shuffles,
repeats and reads ahead; `Turns` mixes sources in exact shares, where Grain's `mix`
rounds weights.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import grain
import numpy as np

from meshpar.data.token_files import TokenStream
from meshpar.errors import DataError

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


def mixed(
    sources: Sequence[Any], *, seed: int, weights: Sequence[Fraction] | None = None
) -> grain.MapDataset:
    """Return an endless dataset of rows: every row of a source once in each epoch.

    Each source is shuffled anew in each epoch. With weights 7 and 3, of any first n
    rows `0.7 n` are of the first source, rounded down or up, and of each 10 from a
    multiple of 10 on exactly 7. (Grain's own `mix` rounds weights to hundredths of the
    smallest: 0.7 and 0.3 become 233 and 100.)

    Args:
        sources: Sources with a length, and rows by number.
        seed: Seed of all orders.
        weights: Weight of each source; needed if there are several.
    """
    # Grain shuffles epoch e with seed + e, so neighbouring seeds would share orders.
    seeds = np.random.SeedSequence(seed).generate_state(len(sources))
    endless = [
        grain.MapDataset.source(source).shuffle(seed=int(number)).repeat()
        for source, number in zip(sources, seeds, strict=True)
    ]
    if weights is None or len(sources) == 1:
        return endless[0]
    return grain.MapDataset.select_from_datasets(endless, Turns(weights))


class Turns:
    """Source of each row, and the row's number there, for Grain's selection.

    The i-th of all rows is the first source's where `floor(i * share)` grows; the rest
    are shared out among the other sources in the same way.

    Args:
        weights: Positive weight of each source.

    Example:
        >>> turns = Turns([Fraction(2), Fraction(1)])
        >>> [turns[number] for number in range(4)]
        [(1, 0), (0, 0), (0, 1), (1, 1)]
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        common = math.lcm(*(Fraction(weight).denominator for weight in weights))
        self._weights = [int(weight * common) for weight in weights]

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Return the source of row `index`, and the number of the row there."""
        left = sum(self._weights)
        before, after = int(index), int(index) + 1
        for source, weight in enumerate(self._weights):
            first, end = before * weight // left, after * weight // left
            if first != end or weight == left:
                return source, first
            before, after, left = before - first, after - end, left - weight
        raise AssertionError("the last source takes what is left")


@contextlib.contextmanager
def device_batches(
    batch_of: Callable[[int], Any],
    place: Callable[[Any], Any],
    *,
    num_steps: int,
    ahead: int = 2,
) -> Iterator[Iterator[Any]]:
    """Yield the batches of steps 0, 1, ..., read and placed while others compute.

    Grain's threads read up to `ahead` batches further than the step that runs. No state
    needs saving, since a batch is a function of its number.

    Args:
        batch_of: Step -> this process's rows.
        place: Function that puts them on the devices: `step.place`.
        num_steps: Number of batches.
        ahead: Most batches that wait on the devices.
    """
    options = grain.ReadOptions(num_threads=ahead, prefetch_buffer_size=ahead)
    numbers = grain.MapDataset.range(num_steps)
    batches = iter(
        numbers.map(lambda step: place(batch_of(int(step)))).to_iter_dataset(options)
    )
    try:
        yield batches
    finally:
        batches.close()
