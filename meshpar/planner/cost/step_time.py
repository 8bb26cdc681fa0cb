"""Time of a step: stages, pipeline, gradient reduction, optimizer, stragglers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshpar.planner.cost.cost import HOST, Cost, waiting
from meshpar.planner.cost.kernel_time import host_s, memory_s
from meshpar.planner.cost.memory import (
    end_parameters,
    rank_parameters,
    routed_parameters,
    stored_bytes,
    update_bytes,
)
from meshpar.planner.cost.pipeline_time import all_ticks_s, span_s
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.stage_time import (
    StageTime,
    scatters_ends_each_tick,
    stage_times,
)
from meshpar.planner.machine.collective_cost import (
    all_gather_s,
    all_reduce_s,
    reduce_scatter_s,
)


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


def step_time(run: Run) -> StepTime:
    """The time of one step."""
    stages = stage_times(run)
    layout = run.layout
    forward_s = [stage.forward.total_s for stage in stages]
    backward_s = [stage.backward.total_s for stage in stages]
    span = all_ticks_s if run.execution.lock_step else span_s
    all_microbatches_s = span(layout, forward_s, backward_s)
    rank = _slowest_rank(run, stages)
    work = _rank_work(run, stages, rank) * layout.microbatches
    reduction = _reduction(run, stages)
    optimizer_s = max(_optimizer_s(run, rank) for rank in range(layout.stage))
    exposed_s = {**(Cost(0.0, work.exposed_s) + reduction).exposed_s}
    waits_s = run.execution.host_s + exposed_s.pop(HOST, 0.0)
    busy_s = all_microbatches_s + reduction.total_s + optimizer_s
    return StepTime(
        compute_s=work.compute_s,
        bubble_s=max(0.0, all_microbatches_s - work.total_s),
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


def _rank_work(run: Run, stages: tuple[StageTime, ...], rank: int) -> Cost:
    """One microbatch through all chunks of a rank."""
    total = Cost()
    for stage in run.stages_of_rank(rank):
        total = total + stages[stage].forward + stages[stage].backward
    return total


def _slowest_rank(run: Run, stages: tuple[StageTime, ...]) -> int:
    return max(
        range(run.layout.stage),
        key=lambda rank: _rank_work(run, stages, rank).total_s,
    )


def _reduction(run: Run, stages: tuple[StageTime, ...]) -> Cost:
    """Gradients over the mesh axes whose devices have other tokens.

    Overlapped, it hides behind the last microbatch's backward of the first rank, which
    is the last to end.
    """
    layout, execution = run.layout, run.execution
    backward_s = sum(stages[at].backward.total_s for at in run.stages_of_rank(0))
    hidden_s = backward_s if execution.reduction_overlap else 0.0
    total = Cost()
    for mesh_axis, seconds in _reductions(run).items():
        total += waiting(mesh_axis, seconds, hidden_s=hidden_s)
        hidden_s = max(0.0, hidden_s - seconds)
    parameters = max(rank_parameters(run, rank) for rank in range(layout.stage))
    if run.state_shards > 1 and layout.zero in (1, 2):
        gathered = parameters * stored_bytes(run)[0]
        total += _gather_of_states(run, gathered)
    if layout.zero == 3 and run.gathers_once:
        total += _gather_of_states(run, parameters * run.dtype_bytes)
        total += _scatter_of_states(run, parameters * execution.reduction_bytes)
    elif layout.zero == 3:
        total += _gather_of_ends(run)
    return total + _tied(run)


def _gather_of_ends(run: Run) -> Cost:
    """Embedding and head gathered once, and unless each tick does it scattered once.

    A head of its own can move beside the blocks.
    """
    hidden = 0.0
    if run.execution.gather_overlap and run.layout.stage == 1:
        hidden = run.workload.head_parameters / run.layout.tensor
    ends = max(end_parameters(run, rank) for rank in range(run.layout.stage)) - hidden
    cost = _gather_of_states(run, ends * run.dtype_bytes)
    if scatters_ends_each_tick(run):
        return cost
    return cost + _scatter_of_states(run, ends * run.execution.reduction_bytes)


def _gather_of_states(run: Run, num_bytes: float) -> Cost:
    """An all-gather over what ZeRO splits; nothing hides it."""
    axes, shards = run.layout.split_axes, run.state_shards
    if shards == 1:
        return Cost()
    return waiting(axes[0], all_gather_s(num_bytes, shards, run.link(*axes)))


def _scatter_of_states(run: Run, num_bytes: float) -> Cost:
    """A reduce-scatter there; nothing hides it either."""
    axes, shards = run.layout.split_axes, run.state_shards
    if shards == 1:
        return Cost()
    return waiting(axes[0], reduce_scatter_s(num_bytes, shards, run.link(*axes)))


def _tied(run: Run) -> Cost:
    """A tied table on the first and the last rank: its gradient is summed over both."""
    workload, layout = run.workload, run.layout
    on_one_rank = run.num_stages - 1 in run.stages_of_rank(0)
    if not workload.tied or on_one_rank or run.execution.shared_ends:
        return Cost()
    table = workload.vocab * workload.hidden / layout.tensor
    pair = all_reduce_s(table * run.execution.reduction_bytes, 2, run.link("stage"))
    return waiting("stage", pair)


def _reductions(run: Run) -> dict[str, float]:
    """Seconds of every sum of gradients, by mesh axis."""
    layout, each = run.layout, run.execution.reduction_bytes
    parameters = max(rank_parameters(run, rank) for rank in range(layout.stage))
    split, seconds = run.state_shards, {}
    axes = layout.split_axes if split > 1 else ()
    if axes and layout.zero < 3:
        # ZeRO-1 and 2 need their own share of the sums only.
        link = run.link(*axes)
        seconds[axes[0]] = reduce_scatter_s(parameters * each, split, link)
    if layout.expert > 1:
        # Devices of `expert` have the same dense parameters, and other examples.
        dense = max(
            rank_parameters(run, rank) - routed_parameters(run, rank)
            for rank in range(layout.stage)
        )
        link = run.link("expert")
        seconds["expert"] = all_reduce_s(dense / split * each, layout.expert, link)
    others = run.summed_axes
    degree = math.prod(layout.mesh_shape[axis] for axis in others)
    ends = 0.0
    if run.execution.shared_ends and layout.stage > 1:
        # The ranks have a share of the tokens each, so their sums are partial.
        ends = end_parameters(run, 0) / split * each
        link = run.link(*others, "stage")
        seconds["stage"] = all_reduce_s(ends, degree * layout.stage, link)
    if degree > 1:
        own = parameters / split * each - ends
        slowest = next(axis for axis in others if layout.mesh_shape[axis] > 1)
        seconds[slowest] = seconds.get(slowest, 0.0) + all_reduce_s(
            own, degree, run.link(*others)
        )
    return seconds


def _optimizer_s(run: Run, rank: int) -> float:
    """The update, and its state from the host's memory and back."""
    own = rank_parameters(run, rank) / run.state_shards
    seconds = memory_s(run, own * update_bytes(run))
    if run.layout.optimizer_memory == "device":
        return seconds
    return seconds + 2 * host_s(run, own * stored_bytes(run)[1])
