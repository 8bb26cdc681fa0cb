"""Time of a step: stages, pipeline, gradient reduction, optimizer, stragglers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshpar.planner.cost.cost import HOST, Cost
from meshpar.planner.cost.kernel_time import host_s, memory_s
from meshpar.planner.cost.parameters import shared_out, stored_bytes, update_bytes
from meshpar.planner.cost.pipeline_time import all_ticks_s, span_s
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.stage_time import StageTime, stage_times
from meshpar.planner.cost.step_traffic import step_rows
from meshpar.planner.cost.traffic_row import BLOCKS, LAST_BACKWARD, NEXT_FORWARD
from meshpar.planner.cost.traffic_time import exposed


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Where a step's time goes; the parts add up to `step_s`.

    Args:
        compute_s: The slowest rank's blocks and ends.
        bubble_s: Waiting of that rank for other ranks.
        exposed_s: Waiting for collectives that nothing hides, by mesh axis.
        optimizer_s: The update.
        straggler_s: Waiting for the slowest of all devices.
        host_s: Waiting for the host: between steps, and for residuals from its memory.
    """

    compute_s: float
    bubble_s: float
    exposed_s: Mapping[str, float]
    optimizer_s: float
    straggler_s: float
    host_s: float

    @property
    def step_s(self) -> float:
        """All of it."""
        exposed_s = sum(self.exposed_s.values())
        return (
            self.compute_s
            + self.bubble_s
            + exposed_s
            + self.optimizer_s
            + self.straggler_s
            + self.host_s
        )

    def as_json(self) -> dict[str, Any]:
        """The `time` of a plan, in seconds."""
        return {
            "compute_s": self.compute_s,
            "bubble_s": self.bubble_s,
            "exposed": dict(self.exposed_s),
            "optimizer_s": self.optimizer_s,
            "straggler_s": self.straggler_s,
            "host_s": self.host_s,
        }


def step_time(run: Run) -> StepTime:
    """The time of one step."""
    stages = stage_times(run)
    layout = run.layout
    forward_s = [stage.forward.total_s for stage in stages]
    backward_s = [stage.backward.total_s for stage in stages]
    span = all_ticks_s if run.execution.lock_step else span_s
    all_microbatches_s = span(layout, forward_s, backward_s)
    rank = _slowest_rank(run, stages)
    own = _rank_cost(run, stages, rank) * layout.microbatches
    once = _once(run, stages)
    optimizer_s = max(_optimizer_s(run, rank) for rank in range(layout.stage))
    exposed_s = {**(Cost(0.0, own.exposed_s) + once).exposed_s}
    waits_s = run.execution.host_s + exposed_s.pop(HOST, 0.0)
    busy_s = all_microbatches_s + once.total_s + optimizer_s
    return StepTime(
        compute_s=own.compute_s,
        bubble_s=max(0.0, all_microbatches_s - own.total_s),
        exposed_s={axis: s for axis, s in exposed_s.items() if s > 0},
        optimizer_s=optimizer_s,
        straggler_s=busy_s * straggler_fraction(run),
        host_s=waits_s,
    )


def straggler_fraction(run: Run) -> float:
    """How much longer than the mean the slowest of all devices takes.

    The largest of n normal values lies about `sigma sqrt(2 ln n)` above their mean.
    """
    devices = run.cluster.num_devices
    return run.cluster.device.efficiency.spread * math.sqrt(2 * math.log(devices))


def _rank_cost(run: Run, stages: tuple[StageTime, ...], rank: int) -> Cost:
    """One microbatch through all chunks of a rank."""
    total = Cost()
    for stage in run.stages_of_rank(rank):
        total = total + stages[stage].forward + stages[stage].backward
    return total


def _slowest_rank(run: Run, stages: tuple[StageTime, ...]) -> int:
    return max(
        range(run.layout.stage),
        key=lambda rank: _rank_cost(run, stages, rank).total_s,
    )


def _once(run: Run, stages: tuple[StageTime, ...]) -> Cost:
    """Gradients summed over devices with other tokens, and what ZeRO moves once.

    Overlapped, the sums hide behind the last microbatch's backward of the first rank,
    which is the last to end.
    """
    beside = {BLOCKS: math.inf}
    first = [stages[at] for at in run.stages_of_rank(0)]
    if run.execution.reduction_overlap:
        beside[LAST_BACKWARD] = sum(stage.backward.total_s for stage in first)
    if run.execution.update_overlap:
        beside[NEXT_FORWARD] = sum(stage.forward.total_s for stage in first)
    return exposed(run, step_rows(run, range(run.layout.stage)), beside)


def _optimizer_s(run: Run, rank: int) -> float:
    """The update, and its state from the host's memory and back."""
    own = shared_out(run, rank)
    seconds = memory_s(run, own * update_bytes(run))
    if run.layout.optimizer_memory == "device":
        return seconds
    return seconds + 2 * host_s(run, own * stored_bytes(run)[1])
