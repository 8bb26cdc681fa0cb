"""A step's gradients computed twice, bit by bit, which a broken device fails at."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import numpy as np

from meshpar.rules.sharding import path_name
from meshpar.train.state import TrainState
from meshpar.train.step import Batch, TrainStep

Sums = dict[tuple[str, str], int]
"""(path of an array, device) -> CRC-32 of the bytes that the device holds of it."""


def replay(step: TrainStep, state: TrainState, batch: Batch) -> str | None:
    """What two computations of the same loss and gradients differ in, one line.

    One program on one state and one batch gives the same bits again, as long as its
    devices are sound. It takes twice the gradients' time, and their memory once. An
    error spreads through reductions, so that the device that made it is one of those
    named. None where nothing differs on this process's devices.

    Args:
        step: The compiled step.
        state: From `init` or a step; it is not donated.
        batch: As a step takes it.
    """
    placed = step.place(batch)
    first, second = (_sums(step, state, placed) for _ in range(2))
    return difference(first, second)


def difference(first: Sums, second: Sums) -> str | None:
    """The arrays and devices whose bits are others.

    Example:
        >>> difference({("loss", "cpu:0"): 1}, {("loss", "cpu:0"): 2})
        'computed twice, loss is not the same on cpu:0'
    """
    differing = [key for key in first if first[key] != second[key]]
    if not differing:
        return None
    paths = sorted({path for path, _ in differing})
    devices = sorted({device for _, device in differing})
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"computed twice, {paths[0]}{more} is not the same on {', '.join(devices)}"


def _sums(step: TrainStep, state: TrainState, batch: Batch) -> Sums:
    loss, gradients = step.loss_and_gradients(state, batch)
    arrays: Any = {"loss": loss, "gradients": gradients}
    return {
        (path_name(path), str(shard.device)): zlib.crc32(
            np.asarray(shard.data).tobytes()
        )
        for path, array in jax.tree.leaves_with_path(arrays)
        for shard in array.addressable_shards
    }
