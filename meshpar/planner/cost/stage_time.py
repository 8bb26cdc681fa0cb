"""Time of every stage: its blocks, and the embedding and head where they are."""

from __future__ import annotations

from dataclasses import dataclass

from meshpar.planner.cost.block_time import (
    BlockTime,
    accumulated_s,
    block_parameters,
    block_time,
)
from meshpar.planner.cost.cost import Cost, waiting
from meshpar.planner.cost.kernel_time import matmul_s, memory_s
from meshpar.planner.cost.memory import end_parameters
from meshpar.planner.cost.run import Run
from meshpar.planner.machine.collective_cost import (
    all_gather_s,
    all_reduce_s,
    reduce_scatter_s,
    send_s,
)


@dataclass(frozen=True)
class StageTime:
    """Costs of one stage for one microbatch.

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
    first_layer, stages = 0, []
    for stage, num_blocks in enumerate(run.stage_blocks):
        forward, backward = _ends(run, stage)
        for moe in times:
            layers = range(first_layer, first_layer + num_blocks)
            count = sum(run.workload.is_moe(layer) == moe for layer in layers)
            forward += gathered[moe].forward * count
            backward += gathered[moe].backward * count
        if not run.execution.hop_overlap and run.layout.stage > 1:
            hop = waiting("stage", hop_s(run))
            forward, backward = forward + hop, backward + hop
        stages.append(StageTime(forward, backward))
        first_layer += num_blocks
    return tuple(stages)


def hop_s(run: Run) -> float:
    """Time of a microbatch's activations from a stage to the next."""
    own = run.residual_bytes * run.residual_share
    if not run.execution.hop_split or run.layout.sequence_parallel:
        return send_s(own, run.link("stage"))
    tensor = run.layout.tensor
    gather_s = all_gather_s(own, tensor, run.link("tensor"))
    return send_s(own / tensor, run.link("stage")) + gather_s


def _gathered(run: Run, time: BlockTime, *, moe: bool) -> StageTime:
    """A block's costs with what `fsdp` adds: weights gathered, gradients scattered.

    Each hides behind the work of the layer beside it, where the execution overlaps.
    """
    layout, shards = run.layout, run.state_shards
    if shards == 1 or layout.zero < 3 or run.gathers_once:
        return StageTime(time.forward, time.backward)
    axes = layout.split_axes
    link, parameters = run.link(*axes), block_parameters(run, moe=moe)
    gather_s = all_gather_s(parameters * run.dtype_bytes, shards, link)
    reduced = parameters * run.execution.reduction_bytes
    scatter_s = reduce_scatter_s(reduced, shards, link)
    beside = 1.0 if run.execution.gather_overlap else 0.0
    forward = waiting(axes[0], gather_s, hidden_s=beside * time.forward.compute_s)
    backward = waiting(
        axes[0], gather_s + scatter_s, hidden_s=beside * time.backward.compute_s
    )
    return StageTime(time.forward + forward, time.backward + backward)


def _ends(run: Run, stage: int) -> tuple[Cost, Cost]:
    """Embedding and head of one microbatch, as far as this stage computes them."""
    if run.execution.shared_ends:
        return _shared_ends(run, stage)
    forward, backward = Cost(), Cost()
    if stage == 0:
        forward += _embedding(run, run.tokens)
        backward += _embedding_gradient(run, run.tokens)
    if stage == run.num_stages - 1:
        head = _head(run, run.tokens)
        forward, backward = forward + head[0], backward + head[1]
    return forward, backward


def _shared_ends(run: Run, stage: int) -> tuple[Cost, Cost]:
    """Every rank has a share of the tokens, of each microbatch that enters or leaves.

    In lock step all ranks pay it in every tick, whichever chunk that is of; otherwise
    a rank's chunks share it.
    """
    ranks = run.layout.stage
    per_chunk = 1.0 if run.execution.lock_step else ranks / run.num_stages
    tokens = run.tokens / ranks
    own = run.residual_bytes * run.residual_share
    link = run.link("stage")
    gathered = waiting("stage", all_gather_s(own, ranks, link))
    scattered = waiting("stage", reduce_scatter_s(own, ranks, link))
    head_forward, head_backward = _head(run, tokens)
    # Head and loss with their gradients belong to the forward's tick.
    forward = _embedding(run, tokens) + head_forward + head_backward
    forward += gathered * 2 + scattered
    backward = _embedding_gradient(run, tokens) + scattered
    if ranks == 1:
        forward, backward = (
            _embedding(run, tokens) + head_forward,
            (_embedding_gradient(run, tokens) + head_backward),
        )
    split = _scattered_ends(run)
    return (forward + split) * per_chunk, (backward + split) * per_chunk


def scatters_ends_each_tick(run: Run) -> bool:
    """Whether what a tick adds to the ends' gradients is scattered in that tick."""
    layout = run.layout
    split = layout.zero == 3 and run.state_shards > 1 and not run.gathers_once
    return run.execution.lock_step and layout.runs_in_ticks and split


def _scattered_ends(run: Run) -> Cost:
    if not scatters_ends_each_tick(run):
        return Cost()
    axes = run.layout.split_axes
    each = end_parameters(run, 0) * run.execution.reduction_bytes
    seconds = reduce_scatter_s(each, run.state_shards, run.link(*axes))
    return waiting(axes[0], seconds)


def _embedding(run: Run, tokens: float) -> Cost:
    """Rows looked up; over `tensor` each device has some of the vocabulary."""
    row_bytes = run.workload.hidden * run.dtype_bytes
    cost = Cost(memory_s(run, 2 * tokens * row_bytes))
    tensor = run.layout.tensor
    sum_s = all_reduce_s(tokens * row_bytes, tensor, run.link("tensor"))
    return cost + waiting("tensor", sum_s) if tensor > 1 else cost


def _embedding_gradient(run: Run, tokens: float) -> Cost:
    """Rows added to the whole table's gradient, and that to its sum."""
    rows_s = memory_s(run, 3 * tokens * run.workload.hidden * run.dtype_bytes)
    return Cost(rows_s + accumulated_s(run, _table(run)))


def _table(run: Run) -> float:
    return run.workload.vocab * run.workload.hidden / run.layout.tensor


def _head(run: Run, tokens: float) -> tuple[Cost, Cost]:
    """Final norm, logits and loss, forward and backward."""
    tensor, hidden = run.layout.tensor, run.workload.hidden
    vocab = run.workload.vocab / tensor
    logits_s = matmul_s(run, tokens, hidden, vocab)
    # Converted to fp32 (read 2, write 4), their maximum (read 4), their exponentials
    # (read 4, write 4), the sum (read 4); back, the gradient (read 4, write 4),
    # converted (read 4, write 2).
    forward = Cost(logits_s + memory_s(run, 22 * tokens * vocab))
    both_s = matmul_s(run, tokens, vocab, hidden) + matmul_s(run, hidden, tokens, vocab)
    backward = Cost(both_s + memory_s(run, 14 * tokens * vocab))
    backward += Cost(accumulated_s(run, _table(run)))
    if tensor == 1:
        return forward, backward
    moved = tokens * hidden * run.dtype_bytes
    sum_s = all_reduce_s(moved, tensor, run.link("tensor"))
    return forward, backward + waiting("tensor", sum_s)
