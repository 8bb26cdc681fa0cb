"""Predicted and measured bubble of a pipelined step.

Predicted is the lock step of the schedule: all ranks run every tick, those without
work on zeros. Measured is the part of a step's time that is not in proportion to its
microbatches:

    useful = t(2M) - t(M)
    bubble = 1 - useful / t(M)

with t(M) the time of a step of M microbatches, all of one size. It assumes nothing of
the schedule and holds for idle devices as for devices that compute on zeros or share a
core. What a step does once (gradient reduction, optimizer) counts as bubble too: where
ticks take what the schedule says, it is

    predicted + (1 - predicted) * once / t(M)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from meshpar import TrainState, TrainStep
from meshpar.model.inputs import Batch
from meshpar.recipes.run import Run
from meshpar.recipes.step import make_step
from meshpar.schedules import (
    Schedule,
    StageTimes,
    idle_fraction,
    lock_step_span_s,
    tick_table,
)


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """Medians over rounds in which both steps ran in turn.

    Args:
        step_s: Time of the run's own step.
        useful_s: What another step's worth of microbatches adds to it.
        rounds: How many.
    """

    step_s: float
    useful_s: float
    rounds: int

    @property
    def fraction(self) -> float:
        """The part of the step that is not useful."""
        return 1 - self.useful_s / self.step_s


def run_bubble(
    run: Run, state: TrainState, batch: Batch
) -> tuple[float, Bubble | None]:
    """The predicted bubble and the measured one, if it is; uses `state` up."""
    config, step = run.config, run.step
    predicted = predicted_bubble(step.schedule, step.layers_of_stages)
    # A schedule of one's own has none of twice the microbatches to compare with.
    if not config.bubble_rounds or config.schedule is not None:
        return predicted, None
    line = str(replace(step.layout, microbatches=2 * step.layout.microbatches))
    twice = make_step(replace(config, layout=line))
    found = measured_bubble(step, twice, state, batch, config.bubble_rounds)
    return predicted, found


def predicted_bubble(schedule: Schedule, stage_layers: Sequence[int]) -> float:
    """Idle part of the ranks' time in lock step, a backward as long as two forwards.

    (S - 1) / (M + S - 1) for even stages under 1F1B and GPipe; uneven stages count
    the places without a layer too.

    Args:
        schedule: What the ranks do.
        stage_layers: Layers of each stage.

    Example:
        >>> from meshpar.schedules import make_schedule
        >>> predicted_bubble(make_schedule("1f1b", 2, 4), stage_layers=(2, 2))
        0.2
    """
    sizes = tuple(stage_layers)
    times = StageTimes(forward_s=sizes, input_grad_s=sizes, weight_grad_s=sizes)
    work_s = sum(times.action_s(action) for action in schedule.actions)
    span_s = lock_step_span_s(schedule, tick_table(schedule), times)
    return idle_fraction(span_s, work_s, schedule.num_ranks)


def measured_bubble(
    step: TrainStep,
    twice: TrainStep,
    state: TrainState,
    batch: Batch,
    rounds: int,
) -> Bubble:
    """The bubble of `step`, measured on a trained state, which is used up.

    Args:
        step: The run's own.
        twice: The same with twice the microbatches.
        state: Parameters and optimizer state; donated.
        batch: Of `step`; the other gets it twice, so that microbatches are as large.
        rounds: Timed steps of each, after one that compiles.
    """
    both = {name: np.concatenate([array, array]) for name, array in batch.items()}
    step_s, useful_s = [], []
    for _ in range(1 + rounds):
        state, one_s = _timed(step, state, batch)
        state, two_s = _timed(twice, state, both)
        step_s.append(one_s)
        useful_s.append(two_s - one_s)
    return Bubble(
        step_s=statistics.median(step_s[1:]),
        useful_s=statistics.median(useful_s[1:]),
        rounds=rounds,
    )


def _timed(step: Callable, state: TrainState, batch: Batch) -> tuple[TrainState, float]:
    start = time.perf_counter()
    state, metrics = jax.block_until_ready(step(state, batch))
    return state, time.perf_counter() - start
