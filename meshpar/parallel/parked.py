"""An array of the devices in the host's memory, so that theirs is free meanwhile."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

Box = tuple[tuple[int, int], ...]
"""Of each dim, the first place and the one after the last."""


class Parked:
    """A copy of all shards, each once, of which any part can be read.

    Args:
        array: Its devices are all of this process.
    """

    def __init__(self, array: jax.Array) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self._shards: dict[Box, np.ndarray] = {}
        for shard in array.addressable_shards:
            box = _box(shard.index, array.shape)
            if box not in self._shards:
                # A copy: what NumPy has of a CPU's array would be gone with it.
                self._shards[box] = np.array(shard.data)

    def __getitem__(self, index: Any) -> np.ndarray:
        """A part: a slice for each of the first dims."""
        index = index if isinstance(index, tuple) else (index,)
        index += (slice(None),) * (len(self.shape) - len(index))
        wanted = _box(index, self.shape)
        if wanted in self._shards:
            return self._shards[wanted]
        found = np.empty([stop - start for start, stop in wanted], self.dtype)
        for box, shard in self._shards.items():
            common = tuple(
                (max(one[0], other[0]), min(one[1], other[1]))
                for one, other in zip(wanted, box, strict=True)
            )
            if all(start < stop for start, stop in common):
                found[_within(common, wanted)] = shard[_within(common, box)]
        return found


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    parts = zip(index, shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in parts)


def _within(box: Box, whole: Box) -> tuple[slice, ...]:
    """The part of an array of `whole` that is `box`."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(box, whole, strict=True)
    )
