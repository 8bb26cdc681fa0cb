"""Time of every stage: its blocks, and the embedding and head where they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshpar.planner.cost.block_time import (
    BlockTime,
    accumulated_s,
    block_time,
    weight_grad_s,
)
from meshpar.planner.cost.cost import Cost
from meshpar.planner.cost.kernel_time import matmul_s, memory_s
from meshpar.planner.cost.parameters import table_parameters
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.traffic import end_rows, hop_rows, weight_rows
from meshpar.planner.cost.traffic_row import LAYER, MATMULS, of_pass
from meshpar.planner.cost.traffic_time import exposed


@dataclass(frozen=True)
class StageTime:
    """Costs of one stage, or of its embedding or head, for one microbatch.

    Args:
        forward: F, with the hop that no work hides.
        backward: B.
    """

    forward: Cost
    backward: Cost


def stage_times(run: Run) -> tuple[StageTime, ...]:
    """The costs of every stage, chunk by chunk in order of the stages."""
    times = {
        moe: block_time(run, moe=moe)
        for moe in {run.workload.is_moe(0), run.workload.is_moe(run.workload.layers)}
    }
    gathered = {moe: _gathered(run, times[moe], moe=moe) for moe in times}
    ends = _Ends.of(run)
    up, down = _hops(run)
    first_layer, stages = 0, []
    for stage, num_blocks in enumerate(run.stage_blocks):
        forward, backward = ends.of_stage(run, stage)
        for moe in times:
            layers = range(first_layer, first_layer + num_blocks)
            count = sum(run.workload.is_moe(layer) == moe for layer in layers)
            forward += gathered[moe].forward * count
            backward += gathered[moe].backward * count
        stages.append(StageTime(forward + up, backward + down))
        first_layer += num_blocks
    return tuple(stages)


def tick_overhead(run: Run) -> StageTime:
    """What a tick has beside its blocks, where all ranks do the same in every tick.

    Its share of embedding and head, and the hops that no work hides.
    """
    up, down = _hops(run)
    forward, backward = _Ends.of(run).of_stage(run, 0)
    return StageTime(forward + up, backward + down)


def _hops(run: Run) -> tuple[Cost, Cost]:
    """An activation's to the next stage, and a gradient's to the one before."""
    hops = hop_rows(run) if not run.execution.hop_overlap else ()
    waited = Cost(0.0, {"stage": run.execution.hop_wait_s} if hops else {})
    beside = {MATMULS: math.inf}  # those of a whole tick
    up, down = (
        waited + exposed(run, of_pass(hops, way), beside) for way in ("up", "down")
    )
    return up, down


def _gathered(run: Run, time: BlockTime, *, moe: bool) -> StageTime:
    """A block's costs with those of its weights gathered and gradients scattered.

    Each hides behind the work of the layer beside it, where the execution overlaps: as
    far as that hides no collective of its own.
    """
    rows = weight_rows(run, moe=moe)
    overlaps = run.execution.gather_overlap or run.execution.measured_overlap
    forward, backward = (
        exposed(run, of_pass(rows, passes), {LAYER: spare_s} if overlaps else {})
        for passes, spare_s in zip(("forward", "backward"), time.spare_s, strict=True)
    )
    return StageTime(time.forward + forward, time.backward + backward)


@dataclass(frozen=True)
class _Ends:
    """Embedding and head of one microbatch, forward and backward."""

    embedding: StageTime
    head: StageTime

    @classmethod
    def of(cls, run: Run) -> _Ends:
        """Of all tokens, or of a rank's share of them."""
        tokens = run.tokens / (run.layout.stage if run.execution.shared_ends else 1)
        rows = end_rows(run)
        waits = {
            passes: exposed(run, of_pass(rows, passes))
            for passes in ("forward", "head", "backward")
        }
        forward_s, backward_s = _head_s(run, tokens)
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
            StageTime(Cost(forward_s), Cost(backward_s) + waits["head"]),
        )

    def of_stage(self, run: Run, stage: int) -> tuple[Cost, Cost]:
        """As far as this stage computes them.

        Shared ones take part of every tick: in lock step of whichever chunk it is;
        otherwise a rank's chunks share them. The head's gradients belong to the tick of
        its forward then.
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
        return forward, backward


def _head_s(run: Run, tokens: float) -> tuple[float, float]:
    """Final norm, logits and loss, forward and backward."""
    hidden, vocab = run.workload.hidden, run.workload.vocab / run.layout.tensor
    logits_s = matmul_s(run, tokens, hidden, vocab)
    # Converted to fp32 (read 2, write 4), their maximum (read 4), their exponentials
    # (read 4, write 4), the sum (read 4); back, the gradient (read 4, write 4),
    # converted (read 4, write 2).
    forward_s = logits_s + memory_s(run, 22 * tokens * vocab)
    both_s = matmul_s(run, tokens, vocab, hidden)
    both_s += weight_grad_s(run, tokens, hidden, vocab)
    return forward_s, both_s + memory_s(run, 14 * tokens * vocab)
