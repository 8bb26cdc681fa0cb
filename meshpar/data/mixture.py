"""Rows of several sources in exact proportions, by number alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import grain
import numpy as np


def mixed(
    sources: Sequence[Any], *, seed: int, weights: Sequence[Fraction] | None = None
) -> grain.MapDataset:
    """An endless order of rows: every row of a source once in each of its epochs.

    Each source is shuffled anew in each epoch. With weights 7 and 3, of any first n
    rows `0.7 n` are of the first source, rounded down or up, and of each 10 from a
    multiple of 10 on exactly 7. (Grain's own `mix` rounds weights to hundredths of the
    smallest: 0.7 and 0.3 become 233 and 100.)

    Args:
        sources: Each with a length, and rows by number.
        seed: Of the orders.
        weights: Of each source; needed where there are several.
    """
    # Grain shuffles epoch e with seed + e, so neighbouring seeds would share orders.
    seeds = np.random.SeedSequence(seed).generate_state(len(sources))
    endless = [
        grain.MapDataset.source(source).shuffle(seed=int(one)).repeat()
        for source, one in zip(sources, seeds, strict=True)
    ]
    if weights is None or len(sources) == 1:
        return endless[0]
    return grain.MapDataset.select_from_datasets(endless, Turns(weights))


class Turns:
    """Whose turn it is, and which of its rows comes: the selection that Grain asks.

    The i-th of all rows is the first source's where `floor(i * share)` grows; those
    left are shared out among the other sources in the same way.

    Args:
        weights: Positive.

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
        """The source of row `index`, and the number of the row there."""
        left = sum(self._weights)
        before, after = int(index), int(index) + 1
        for source, weight in enumerate(self._weights):
            here, then = before * weight // left, after * weight // left
            if here != then or weight == left:
                return source, here
            before, after, left = before - here, after - then, left - weight
        raise AssertionError("the last source takes what is left")
