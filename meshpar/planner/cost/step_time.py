"""Time of a step: stages, pipeline, gradient reduction, optimizer, stragglers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshpar.planner.cost.block_time import (
    BlockTime,
    accumulated_s,
    block_time,
    weight_grad_s,
)
from meshpar.planner.cost.parts import Part, computed_blocks, run_parts
from meshpar.planner.cost.pipeline_time import all_ticks_s, divergent_s, span_s
from meshpar.planner.cost.run import (
    Run,
    shared_out,
    stored_bytes,
    table_parameters,
    update_bytes,
)
from meshpar.planner.cost.seconds import (
    BLOCKS,
    HOST,
    LAST_BACKWARD,
    LAYER,
    MATMULS,
    NEXT_FORWARD,
    Cost,
    exposed,
    host_s,
    matmul_s,
    memory_s,
    rows_in,
)
from meshpar.planner.cost.step_traffic import step_rows
from meshpar.planner.cost.traffic import end_rows, hop_rows, weight_rows
from meshpar.planner.machine.cluster import Cluster

COMPUTING, EXPOSED = "computing", "exposed on "
"""Names of parts of a step's time: the second begins those of mesh axes."""


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
        """Seconds of the step."""
        exposed_s = sum(self.exposed_s.values())
        return (
            self.compute_s
            + self.bubble_s
            + exposed_s
            + self.optimizer_s
            + self.straggler_s
            + self.host_s
        )

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part by its name, computing first; their sum is `step_s`."""
        return {
            COMPUTING: self.compute_s,
            "bubble": self.bubble_s,
            **{f"{EXPOSED}{axis}": seconds for axis, seconds in self.exposed_s.items()},
            "optimizer": self.optimizer_s,
            "stragglers": self.straggler_s,
            "host": self.host_s,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the `time` of a plan, in seconds."""
        return {
            "compute_s": self.compute_s,
            "bubble_s": self.bubble_s,
            "exposed": dict(self.exposed_s),
            "optimizer_s": self.optimizer_s,
            "straggler_s": self.straggler_s,
            "host_s": self.host_s,
        }


def step_time(run: Run) -> StepTime:
    """Return the time of one step, by what it is spent on."""
    stages = stage_times(run)
    layout = run.layout
    parts = run_parts(run)
    if layout.data_splits:
        busiest = busiest_part(run)
        own = _slowest_rank(busiest.run, stage_times(busiest.run))
        own *= busiest.microbatches
        all_microbatches_s = own.total_s
    else:
        own = _slowest_rank(run, stages) * layout.microbatches
        all_microbatches_s = _all_microbatches_s(run, stages)
    once = _slowest(_once(part, stages) for part in parts)
    optimizer_s = max(
        _optimizer_s(part.run, rank) for part in parts for rank in part.ranks
    )
    exposed_s = {**(Cost(0.0, own.exposed_s) + once).exposed_s}
    waits_s = run.execution.host_s + exposed_s.pop(HOST, 0.0)
    busy_s = all_microbatches_s + once.total_s + optimizer_s
    return StepTime(
        compute_s=own.compute_s,
        bubble_s=max(0.0, all_microbatches_s - own.total_s),
        exposed_s={axis: s for axis, s in exposed_s.items() if s > 0},
        optimizer_s=optimizer_s,
        straggler_s=busy_s * straggler_fraction(run.cluster),
        host_s=waits_s,
    )


def busiest_part(run: Run) -> Part:
    """Return the kind of device whose microbatches take longest."""

    def all_s(part: Part) -> float:
        stages = stage_times(part.run)
        return _slowest_rank(part.run, stages).total_s * part.microbatches

    return max(run_parts(run), key=all_s)


def _slowest(costs: Iterable[Cost]) -> Cost:
    return max(costs, key=lambda cost: cost.total_s)


def _slowest_rank(run: Run, stages: tuple[StageTime, ...]) -> Cost:
    """Cost of one microbatch through all chunks of the slowest rank."""
    rank_costs = []
    for rank in range(run.layout.stage):
        own = Cost()
        for stage in run.rank_stages(rank):
            own = own + stages[stage].forward + stages[stage].backward
        rank_costs.append(own)
    return _slowest(rank_costs)


def _all_microbatches_s(run: Run, stages: tuple[StageTime, ...]) -> float:
    """Seconds from the first forward to the last backward."""
    layout, diverges = run.layout, run.execution.lock_step and run.layout.divergent
    if diverges:
        stages = stage_times(run, blocks_only=True)
    forward_s = [stage.forward.total_s for stage in stages]
    input_grad_s = [stage.input_grad.total_s for stage in stages]
    weight_grad_s = [stage.weight_grad.total_s for stage in stages]
    if not diverges:
        span = all_ticks_s if run.execution.lock_step else span_s
        return span(layout, forward_s, input_grad_s, weight_grad_s)
    # All ranks hop and share the ends between the actions.
    ticks, between = run.pipeline_ticks, tick_overhead(run)
    forward = ticks.forward_ticks * between.forward.total_s
    backward = ticks.backward_ticks * between.backward.total_s
    actions_s = divergent_s(layout, forward_s, input_grad_s, weight_grad_s)
    return actions_s + forward + backward


def straggler_fraction(cluster: Cluster) -> float:
    """Return how much longer than the mean the slowest device takes, as a fraction.

    The largest of n normal values lies about `sigma sqrt(2 ln n)` above their mean.
    """
    devices = cluster.num_devices
    return cluster.device.efficiency.spread * math.sqrt(2 * math.log(devices))


def _once(part: Part, stages: tuple[StageTime, ...]) -> Cost:
    """Cost of gradient sums over devices with other tokens, and of ZeRO's collectives.

    Overlapped, the sums hide behind the last microbatch's backward of the first rank,
    which ends last.
    """
    run, hiding_s = part.run, {BLOCKS: math.inf}
    first = [stages[at] for at in run.rank_stages(0)]
    late = run.prefetches or run.reduces_in_last_microbatch
    if run.execution.reduction_overlap or late:
        hiding_s[LAST_BACKWARD] = sum(stage.backward.total_s for stage in first)
    if run.execution.update_overlap or run.prefetches:
        hiding_s[NEXT_FORWARD] = sum(stage.forward.total_s for stage in first)
    return exposed(run, step_rows(run, part.ranks), hiding_s)


def _optimizer_s(run: Run, rank: int) -> float:
    """Seconds of the update, and of its state from the host's memory and back."""
    own = shared_out(run, rank)
    seconds = memory_s(run, own * update_bytes(run))
    if run.layout.optimizer_memory == "device":
        return seconds
    return seconds + 2 * host_s(run, own * stored_bytes(run)[1])


@dataclass(frozen=True)
class StageTime:
    """Costs of one stage, or of embedding or head, for one microbatch.

    Args:
        forward: F, with the hop that no work hides.
        input_grad: B, or I where backwards are split.
        weight_grad: W where backwards are split.
    """

    forward: Cost
    input_grad: Cost
    weight_grad: Cost = Cost()

    @property
    def backward(self) -> Cost:
        """B."""
        return self.input_grad + self.weight_grad


def stage_times(run: Run, *, blocks_only: bool = False) -> tuple[StageTime, ...]:
    """Return the costs of every stage, chunk by chunk in order of the stages.

    Each on the slowest kind of device that has it.

    Args:
        run: The run.
        blocks_only: Whether to leave out the ends and hops.
    """
    parts = run_parts(run)
    times = [_part_times(part.run, blocks_only=blocks_only) for part in parts]
    if len(parts) == 1:
        return times[0]
    return tuple(
        max(
            (
                own[stage]
                for part, own in zip(parts, times, strict=True)
                if stage in part.stages
            ),
            key=lambda time: time.forward.total_s + time.backward.total_s,
        )
        for stage in range(run.num_stages)
    )


def _part_times(run: Run, *, blocks_only: bool) -> tuple[StageTime, ...]:
    """Return the costs of every stage on one kind of device."""
    times = {
        moe: block_time(run, moe=moe)
        for moe in {run.workload.is_moe(0), run.workload.is_moe(run.workload.layers)}
    }
    gathered = {moe: _gathered(run, times[moe], moe=moe) for moe in times}
    ends = _Ends.from_run(run)
    up, down = _hops(run)
    first_layer, stages = 0, []
    for stage, num_blocks in enumerate(computed_blocks(run)):
        own = ends.at_stage(run, stage)
        forward, backward = (Cost(), Cost()) if blocks_only else own
        weight_grad = Cost()
        for moe in times:
            layers = range(first_layer, first_layer + num_blocks)
            count = sum(run.workload.is_moe(layer) == moe for layer in layers)
            forward += gathered[moe].forward * count
            backward += gathered[moe].input_grad * count
            weight_grad += gathered[moe].weight_grad * count
        if not blocks_only:
            forward, backward = forward + up, backward + down
        stages.append(StageTime(forward, backward, weight_grad))
        first_layer += run.stage_blocks[stage]
    return tuple(stages)


def tick_overhead(run: Run) -> StageTime:
    """Return the cost of a tick besides its blocks, where ranks move in lock step.

    Its share of embedding and head, and the hops that no work hides, on the slowest
    kind of device.
    """
    every = []
    for part in run_parts(run):
        up, down = _hops(part.run)
        forward, backward = _Ends.from_run(part.run).at_stage(part.run, 0)
        every.append(StageTime(forward + up, backward + down))
    return max(every, key=lambda time: time.forward.total_s + time.backward.total_s)


def _hops(run: Run) -> tuple[Cost, Cost]:
    """Costs of an activation's hop to the next stage, and of a gradient's back."""
    beside = run.execution.hop_overlap and run.layout.chunks > 1
    hops = () if beside else hop_rows(run)
    waited = Cost(0.0, {"stage": run.execution.hop_wait_s} if hops else {})
    hiding_s = {MATMULS: math.inf}  # those of a whole tick
    up, down = (
        waited + exposed(run, rows_in(hops, way), hiding_s) for way in ("up", "down")
    )
    return up, down


def _gathered(run: Run, time: BlockTime, *, moe: bool) -> StageTime:
    """Costs of a block with gathering its weights and scattering its gradients.

    Where the execution overlaps them, the spare work of the neighbouring layer hides
    them.
    """
    rows = weight_rows(run, moe=moe)
    overlaps = run.execution.gather_overlap or run.execution.measured_overlap
    forward, backward = (
        exposed(run, rows_in(rows, passes), {LAYER: spare_s} if overlaps else {})
        for passes, spare_s in zip(("forward", "backward"), time.spare_s, strict=True)
    )
    if not run.splits_backward:
        return StageTime(time.forward + forward, time.backward + backward)
    input_grad, weight_grad = time.split_backward
    reduced = exposed(run, rows_in(rows, "weight_grad"))
    return StageTime(
        time.forward + forward, input_grad + backward, weight_grad + reduced
    )


@dataclass(frozen=True)
class _Ends:
    """Embedding and head of one microbatch, forward and backward."""

    embedding: StageTime
    head: StageTime

    @classmethod
    def from_run(cls, run: Run) -> _Ends:
        """Return the costs of all tokens, or of a rank's share of them."""
        tokens = run.tokens / (run.layout.stage if run.execution.shared_ends else 1)
        rows = end_rows(run)
        waits = {
            passes: exposed(run, rows_in(rows, passes))
            for passes in ("forward", "head", "backward")
        }
        forward_s, backward_s = _head_s(run, tokens)
        heads = 1 + run.workload.mtp_layers
        join_s, join_back_s = _join_s(run)
        row_bytes = run.workload.hidden * run.dtype_bytes
        # Rows looked up; back, rows added to the whole table's gradient, and that to
        # its sum.
        looked_up_s = memory_s(run, 2 * tokens * row_bytes)
        added_s = memory_s(run, 3 * tokens * row_bytes)
        added_s += accumulated_s(run, table_parameters(run))
        return cls(
            StageTime(
                Cost(looked_up_s) + waits["forward"],
                Cost(added_s) + waits["backward"],
            ),
            StageTime(
                Cost(heads * forward_s + join_s),
                (Cost(backward_s) + waits["head"]) * heads + Cost(join_back_s),
            ),
        )

    def at_stage(self, run: Run, stage: int) -> tuple[Cost, Cost]:
        """Return the forward and backward costs that this stage has of them.

        Shared ends take part of every tick: in lock step of whichever chunk it is;
        otherwise a rank's chunks share them. The head's gradients then belong to the
        tick of its forward.
        """
        embedding, head, ranks = self.embedding, self.head, run.layout.stage
        if run.execution.shared_ends and ranks > 1:
            per_chunk = 1.0 if run.execution.lock_step else ranks / run.num_stages
            forward = embedding.forward + head.forward + head.backward
            return forward * per_chunk, embedding.backward * per_chunk
        forward, backward = Cost(), Cost()
        if stage == 0:
            forward, backward = embedding.forward, embedding.backward
        if stage == run.num_stages - 1:
            forward, backward = forward + head.forward, backward + head.backward
            later = run.workload.mtp_layers  # which look the next tokens up there
            forward += embedding.forward * later
            backward += embedding.backward * later
        return forward, backward


def _head_s(run: Run, tokens: float) -> tuple[float, float]:
    """Seconds of final norm, logits and loss, forward and backward."""
    hidden, vocab = run.workload.hidden, run.workload.vocab / run.layout.tensor
    logits_s = matmul_s(run, tokens, hidden, vocab, unscaled=True)
    # Converted to fp32 (read 2, write 4), their maximum (read 4), their exponentials
    # (read 4, write 4), the sum (read 4); back, the gradient (read 4, write 4),
    # converted (read 4, write 2), and what the execution reads and writes more.
    forward_bytes, backward_bytes = 22, run.execution.loss_bytes - 22
    if run.execution.fused_loss:
        # Maximum and sum (read 2), the gradient (2, 2); back, scaled (2, 2).
        forward_bytes, backward_bytes = 6, 4
    forward_s = logits_s + memory_s(run, forward_bytes * tokens * vocab)
    both_s = matmul_s(run, tokens, vocab, hidden, unscaled=True)
    both_s += weight_grad_s(run, tokens, hidden, vocab, unscaled=True)
    return forward_s, both_s + memory_s(run, backward_bytes * tokens * vocab)


def _join_s(run: Run) -> tuple[float, float]:
    """Seconds in which `mtp_layers` join two streams of tokens, forward and backward.

    Both are normed and laid side by side (read 2, write 2, twice).
    """
    hidden, layers = run.workload.hidden, run.workload.mtp_layers
    wide, narrow = 2 * hidden, hidden / run.layout.tensor
    moved_s = memory_s(run, 4 * run.dtype_bytes * run.tokens * wide)
    forward_s = matmul_s(run, run.tokens, wide, narrow)
    backward_s = matmul_s(run, run.tokens, narrow, wide)
    backward_s += weight_grad_s(run, run.tokens, wide, narrow)
    return layers * (forward_s + moved_s), layers * (backward_s + 2 * moved_s)
