"""A trial of whole training steps, each waited for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from meshpar.train.step import TrainStep


def step_trial(step: TrainStep, batch: Mapping[str, Any], *, steps: int) -> float:
    """The median seconds of some steps, behind one that compiles and one that warms up.

    Args:
        step: On devices that are there.
        batch: The same for all of them.
        steps: How many are timed.
    """
    state = step.init(seed=0)
    taken = []
    for _ in range(2 + steps):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch))
        taken.append(time.perf_counter() - start)
        del metrics
    return statistics.median(taken[2:])
