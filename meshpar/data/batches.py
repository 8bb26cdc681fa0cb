"""Batches on the devices ahead of their step, from sources mixed in exact shares.

Grain shuffles, repeats and reads ahead; `Turns` replaces its `mix`, which rounds
weights.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import grain
import numpy as np


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
