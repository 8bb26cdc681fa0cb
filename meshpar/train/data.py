"""Batches of token windows, functions of (seed, step) only, and baseline losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshpar.data.batches import mixed
from meshpar.data.documents import read_text
from meshpar.errors import DataError
from meshpar.model.inputs import default_inputs

__all__ = [
    "DataError",
    "HostBatch",
    "TokenWindows",
    "bigram_loss",
    "byte_tokens",
    "ordered_batches",
    "padded_batches",
    "read_texts",
    "shuffled_batches",
    "unigram_loss",
]

HostBatch = dict[str, np.ndarray]


class TokenWindows:
    """Windows of `seq` tokens and their successors, one after another.

    Args:
        tokens: (number of tokens,), whole numbers.
        seq: Tokens of a window.
        names: Names of tokens, successors and weights in a batch; those of a language
            model's inputs when absent.

    Raises:
        DataError: Fewer tokens than one window needs.
    """

    def __init__(
        self, tokens: np.ndarray, seq: int, names: Sequence[str] | None = None
    ) -> None:
        if len(tokens) < seq + 1:
            raise DataError(
                f"{len(tokens)} tokens are too few for one window of {seq} and its "
                "successor; give more text or a shorter window",
                key="data.too_few_tokens",
            )
        self._tokens, self._seq = tokens, seq
        self._names = tuple(default_inputs() if names is None else names)[:3]

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq

    def __getitem__(self, index: int) -> HostBatch:
        """Tokens, successors and weights of one window, (seq,) each."""
        start = int(index) * self._seq
        window = self._tokens[start : start + self._seq + 1].astype(np.int32)
        weights = np.ones(self._seq, np.float32)
        arrays = window[:-1], window[1:], weights
        return dict(zip(self._names, arrays, strict=True))


def shuffled_batches(
    windows: TokenWindows,
    *,
    global_batch: int,
    seed: int,
    skip: int = 0,
    rows: Sequence[int] | None = None,
) -> Callable[[int], HostBatch]:
    """Return the global batch of any step: every window once an epoch, shuffled.

    Args:
        windows: The windows.
        global_batch: Windows in a batch.
        seed: Seed of the order.
        skip: Windows before the first batch, trained on in batches of another size.
        rows: Rows of each batch that are read, a process's own; all when absent.

    Returns:
        Step -> the windows' arrays, each (number of rows, seq). A step can be asked for
        in any order, so a resumed run continues with the very next batch.
    """
    order = mixed([windows], seed=seed)
    return ordered_batches(order, global_batch=global_batch, skip=skip, rows=rows)


def ordered_batches(
    order: Any,
    *,
    global_batch: int,
    skip: int = 0,
    rows: Sequence[int] | None = None,
) -> Callable[[int], HostBatch]:
    """Return the global batch of any step, of rows that come in an endless order.

    Args:
        order: Number -> row, such as `meshpar.data.batches.mixed` returns.
        global_batch: Rows in a batch.
        skip: Rows before the first batch.
        rows: Rows of each batch that are read, a process's own; all when absent.

    Returns:
        Step -> the rows' arrays. A step can be asked for in any order: where a run
        stands in its data is one number, the rows it has trained on.
    """
    rows = range(global_batch) if rows is None else rows
    return lambda step: _stacked(
        [order[skip + step * global_batch + int(row)] for row in rows]
    )


def padded_batches(
    windows: Any, global_batch: int, rows: Sequence[int] | None = None
) -> Iterator[HostBatch]:
    """Yield all windows once and in order; the last batch is filled with weights of 0.

    Args:
        windows: Rows by number, such as `TokenWindows`.
        global_batch: Windows in a batch.
        rows: Rows of each batch that are read, a process's own; all when absent.
    """
    blank = {key: np.zeros_like(value) for key, value in windows[0].items()}
    rows = range(global_batch) if rows is None else rows
    for start in range(0, len(windows), global_batch):
        indices = [start + int(row) for row in rows]
        yield _stacked(
            [windows[one] if one < len(windows) else blank for one in indices]
        )


def _stacked(rows: Sequence[HostBatch]) -> HostBatch:
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def byte_tokens(text: str) -> np.ndarray:
    """Return the UTF-8 bytes of a text, as tokens below 256."""
    return np.frombuffer(text.encode(), np.uint8)


def read_texts(path: Path) -> dict[str, str]:
    """Return name -> text of a file, or of every `.txt` file of a folder.

    Raises:
        DataError: There is no such file, it is empty, or it is not UTF-8 text.
    """
    if not path.exists():
        raise DataError(
            f"no text at {str(path)!r}; give a text file or a folder of them",
            key="data.missing_file",
        )
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise DataError(
            f"the folder {str(path)!r} holds no .txt file", key="data.empty_folder"
        )
    return {file.stem: read_text(file) for file in files}


def unigram_loss(train: np.ndarray, validation: np.ndarray, vocab: int) -> float:
    """Mean `-log p(token)` on `validation`, p counted on `train`.

    Args:
        train: Tokens below `vocab`, to count.
        validation: Tokens below `vocab`, to predict.
        vocab: Number of tokens; every count starts at 1 (Laplace).

    Returns:
        Nats per token, over all tokens but the first.
    """
    counts = np.bincount(train, minlength=vocab) + 1.0
    return float(-np.mean(np.log(counts / counts.sum())[validation[1:]]))


def bigram_loss(train: np.ndarray, validation: np.ndarray, vocab: int) -> float:
    """Mean `-log p(token | token before)` on `validation`, p counted on `train`.

    Every pair starts with as much weight as its second token's share among all, so
    that unseen pairs fall back to the unigram (Jelinek and Mercer 1980).
    """
    unigram = np.bincount(train, minlength=vocab) + 1.0
    pairs = train[:-1].astype(np.int64) * vocab + train[1:]
    counts = np.bincount(pairs, minlength=vocab * vocab).reshape(vocab, vocab)
    smoothed = counts + unigram / unigram.sum()
    probabilities = smoothed / smoothed.sum(axis=1, keepdims=True)
    return float(-np.mean(np.log(probabilities[validation[:-1], validation[1:]])))
