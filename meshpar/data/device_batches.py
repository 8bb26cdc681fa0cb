"""Batches on their devices before a step asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grain


@contextlib.contextmanager
def device_batches(
    batch_of: Callable[[int], Any],
    place: Callable[[Any], Any],
    *,
    num_steps: int,
    ahead: int = 2,
) -> Iterator[Iterator[Any]]:
    """The batches of steps 0, 1, ..., each read and placed while others compute.

    Grain's threads read up to `ahead` batches further than the step that runs; nothing
    of that is state, since a batch is a function of its number.

    Args:
        batch_of: Step -> this process's rows.
        place: Puts them on the devices: `step.place`.
        num_steps: How many there are.
        ahead: Batches that wait on the devices at most.
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
