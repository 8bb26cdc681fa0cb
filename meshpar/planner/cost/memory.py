"""Bytes per device: parameters, gradients, optimizer, activations, workspace."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from meshpar.layout import STAGE_REMATS, Layout
from meshpar.planner.cost.activations import (
    embedding_bytes,
    input_bytes,
    kept_bytes,
    stage_input_bytes,
    stash_bytes,
)
from meshpar.planner.cost.parts import with_places
from meshpar.planner.cost.pipeline_time import Ticks, in_flight
from meshpar.planner.cost.run import (
    Run,
    block_parameters,
    blocks_by_kind,
    end_parameters,
    has_ends,
    outer_bytes,
    rank_parameters,
    shared_out,
    stored_bytes,
    table_parameters,
)
from meshpar.planner.cost.workspace import (
    logits_at_once,
    scanned_weights_bytes,
    stash_copy_bytes,
    tick_ends_bytes,
    workspace_bytes,
)
from meshpar.planner.plan import gigabytes


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the fullest rank's devices.

    Args:
        parameter_bytes: Parameters as stored for use.
        gradient_bytes: Gradients summed over microbatches, and copies of them.
        optimizer_bytes: Masters and the optimizer's state, between updates; with local
            steps the outer optimizer's too.
        fetched_bytes: The same during the update, when the host's memory has them.
        activation_bytes: Arrays that forwards keep for their backwards.
        boundary_bytes: The part of them that arrives from other stages.
        stash_bytes: Arrays that input gradients leave for their weight gradients.
        logit_bytes: Logits and their gradient, at the loss, with the head's gradient.
        late_bytes: The part of the gradients that does not exist yet at the loss.
        gathered_bytes: Parameters gathered or cast for use.
        idle_bytes: The part of them, embedding and head, that is free again after the
            loss; 0 where every tick needs them.
        workspace_bytes: Further arrays of one block in its backward.
        ends_bytes: Whole gradients of embedding and head after the blocks, and their
            sum where they are one table, as far as `gradient_bytes` lacks them.
        stage: Rank.
        in_flight: Microbatches that it holds.
        reserve: Fraction that the allocator holds besides (`Execution.reserve`).
        pending_w: Weight gradients that wait, of a stage each.
        batch_bytes: The batch, such as images.
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    fetched_bytes: float
    activation_bytes: float
    boundary_bytes: float
    logit_bytes: float
    late_bytes: float
    gathered_bytes: float
    idle_bytes: float
    workspace_bytes: float
    ends_bytes: float
    stage: int
    in_flight: float
    reserve: float = 0.0
    stash_bytes: float = 0.0
    pending_w: float = 0.0
    batch_bytes: float = 0.0

    @property
    def state_bytes(self) -> float:
        """Parameters, gradients and optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def other_bytes(self) -> float:
        """Gathered parameters, and the larger of logits and workspace."""
        at_loss = self.logit_bytes - self.late_bytes
        in_block = self.workspace_bytes - self.idle_bytes
        return self.gathered_bytes + max(at_loss, in_block)

    @property
    def temporary_bytes(self) -> float:
        """Most bytes at once besides what is kept between steps."""
        working = self.activation_bytes + self.stash_bytes + self.other_bytes
        later = max(self.ends_bytes, self.fetched_bytes)
        return self.gradient_bytes + max(working, later)

    @property
    def lasting_bytes(self) -> float:
        """Bytes that a step is given: parameters, optimizer state, the batch."""
        return self.parameter_bytes + self.optimizer_bytes + self.batch_bytes

    @property
    def reserve_bytes(self) -> float:
        """Bytes that the allocator holds besides all that is counted."""
        return (self.lasting_bytes + self.temporary_bytes) * self.reserve

    @property
    def total_bytes(self) -> float:
        """Bytes of the device in all."""
        return self.lasting_bytes + self.temporary_bytes + self.reserve_bytes

    def lines(self, layout: Layout) -> list[str]:
        """Return lines of text: bytes by what they are for."""
        at_stage = f" at stage {self.stage}" if layout.stage > 1 else ""
        flight = f"{self.in_flight:g} microbatches in flight{at_stage}"
        stash = (
            f"stash {gigabytes(self.stash_bytes)} ({self.pending_w:g} weight gradients "
            "wait)"
        )
        return [
            f"parameters {gigabytes(self.parameter_bytes)}, gradients "
            f"{gigabytes(self.gradient_bytes)}, optimizer "
            f"{gigabytes(self.optimizer_bytes)}",
            f"activations {gigabytes(self.activation_bytes)} ({flight}, "
            f"remat={layout.remat})",
            f"logits {gigabytes(self.logit_bytes)}, gathered weights "
            f"{gigabytes(self.gathered_bytes)}, workspace "
            f"{gigabytes(self.workspace_bytes)}",
            *([stash] if self.pending_w else []),
        ]

    def as_json(self) -> dict[str, float]:
        """Return the parts and their sums, in whole bytes."""
        parts = {name: round(value) for name, value in asdict(self).items()}
        del parts["reserve"]
        return {
            **parts,
            "reserve_bytes": round(self.reserve_bytes),
            "other_bytes": round(self.other_bytes),
            "temporary_bytes": round(self.temporary_bytes),
            "total_bytes": round(self.total_bytes),
        }


def fullest_memory(run: Run) -> Memory:
    """Return the memory of the rank that needs most."""
    run = with_places(run)
    held = _chunks_held(run)
    fullest: dict[tuple, int] = {}
    for rank, count in enumerate(held):
        # Of ranks with the same blocks, the one that holds most.
        own = has_ends(run, rank), tuple(blocks_by_kind(run, rank))
        if count > held[fullest.setdefault(own, rank)]:
            fullest[own] = rank
    memories = [rank_memory(run, rank, held[rank]) for rank in fullest.values()]
    return max(memories, key=lambda memory: memory.total_bytes)


def rank_memories(run: Run) -> list[Memory]:
    """Return the memory of every rank of `stage`."""
    held = _chunks_held(run)
    return [rank_memory(run, rank, count) for rank, count in enumerate(held)]


def _chunks_held(run: Run) -> tuple[int, ...]:
    """Microbatches times chunks that each rank holds."""
    if run.execution.lock_step:
        return run.pipeline_ticks.in_flight
    layout = run.layout
    sizes = (layout.schedule, layout.stage, layout.microbatches, layout.chunks)
    return in_flight(*sizes)


def rank_memory(run: Run, rank: int, chunks_held: float) -> Memory:
    """Return the memory of one rank that holds so many microbatches times chunks."""
    execution, layout = run.execution, run.layout
    parameters = rank_parameters(run, rank)
    share = shared_out(run, rank) / parameters
    shares = {
        name: share if layout.zero >= level else 1.0
        for name, level in run.split_from.items()
    }
    in_flight = chunks_held / layout.chunks
    layers = [layer for chunk in run.rank_blocks(rank) for layer in chunk]
    kept = sum(
        count * kept_bytes(run, moe=moe) for moe, count in blocks_by_kind(run, rank)
    )
    if layout.remat in STAGE_REMATS:
        kept = stage_input_bytes(run) * layout.chunks
    boundary, ticks = 0.0, run.pipeline_ticks if run.splits_backward else Ticks()
    if layout.stage > 1:  # an activation and a gradient that arrive
        boundary = ticks.arrived * run.residual_bytes * run.residual_share
    pending_w = ticks.stash / layout.chunks
    stash = sum(
        count * stash_bytes(run, moe=moe) for moe, count in blocks_by_kind(run, rank)
    )
    _, has_head = has_ends(run, rank)
    gradient = execution.gradient_bytes * shares["gradient"]
    if layout.zero == 3 and run.gathers_once:
        gradient = execution.gradient_bytes  # whole until the step's end
    copies = execution.bucket_copy_bytes * shares["gradient"]
    gradients = parameters * (gradient + copies)
    once = not execution.eager and not layout.runs_in_ticks
    weight_bytes, state_bytes = stored_bytes(run)
    states = parameters * (state_bytes + outer_bytes(run)) * shares["state"]
    on_host = layout.optimizer_memory == "host"
    gathered = _gathered_bytes(run, rank)
    return Memory(
        parameter_bytes=parameters * weight_bytes * shares["weight"],
        gradient_bytes=gradients,
        optimizer_bytes=0.0 if on_host else states,
        fetched_bytes=states if on_host else 0.0,
        activation_bytes=kept * in_flight + boundary + embedding_bytes(run),
        boundary_bytes=boundary,
        logit_bytes=_logit_bytes(run) if has_head else 0.0,
        late_bytes=gradients if once else 0.0,
        gathered_bytes=gathered,
        idle_bytes=_idle_bytes(run, rank, gathered),
        workspace_bytes=workspace_bytes(run, rank, layers, kept)
        + stash_copy_bytes(run, stash / layout.chunks, layers),
        ends_bytes=_ends_bytes(run, split=shares["gradient"] < 1) if once else 0.0,
        stage=rank,
        in_flight=in_flight,
        reserve=execution.reserve,
        stash_bytes=stash * pending_w,
        pending_w=pending_w if stash else 0.0,
        batch_bytes=input_bytes(run),
    )


def _logit_bytes(run: Run) -> float:
    table = 0.0
    if not run.execution.eager and not run.layout.runs_in_ticks:
        # The gradient of the head's table, whole until the loss is done.
        table = table_parameters(run)
    heads = 1 + run.workload.mtp_layers
    each = run.dtype_bytes if run.execution.fused_loss else run.execution.logit_bytes
    logits = heads * logits_at_once(run) * each
    return logits + table * run.execution.gradient_bytes


def _gathered_bytes(run: Run, rank: int) -> float:
    """Bytes of parameters as ticks and matmuls take them, besides the stored ones."""
    return _cast_bytes(run, rank) + _chunk_bytes(run, rank)


def _chunk_bytes(run: Run, rank: int) -> float:
    """Bytes of a chunk's blocks, which a tick takes out of those of all chunks."""
    chunks = run.layout.chunks
    if run.execution.eager or chunks == 1:
        return 0.0
    whole = run.splits_parameters and run.gathers_once
    each = run.dtype_bytes if whole else stored_bytes(run)[0]
    blocks = rank_parameters(run, rank) - end_parameters(run, rank)
    if run.splits_parameters and not whole:
        blocks /= run.state_shards
    return blocks / chunks * each


def _cast_bytes(run: Run, rank: int) -> float:
    """Bytes of parameters as matmuls take them.

    Whole for the ends, and for one layer and the next one, or for all. Split ones are
    cast before the blocks run, so that what is gathered is narrow; of whole ones the
    compiler casts a layer at a time, two where it unrolls a loop over two.
    """
    layout = run.layout
    split, cast = run.splits_parameters, run.casts_parameters
    if not split and not cast:
        return 0.0
    whole = rank_parameters(run, rank) * run.dtype_bytes
    if split and run.gathers_once:
        return whole
    ends = end_parameters(run, rank) * run.dtype_bytes
    if run.scans_blocks:
        return ends  # and one block's, as `workspace_bytes` counts them
    moe = run.workload.is_moe(run.workload.layers)
    unrolls = max(run.stage_blocks) <= 2 and not layout.divergent
    one_by_one = layout.stage > 1 and not (split or unrolls)
    num_layers = 1 if one_by_one else 2
    layers = num_layers * block_parameters(run, moe=moe) * run.dtype_bytes
    own = end_parameters(run, rank) / run.state_shards
    shards = 0.0
    if split and cast:
        shards = (shared_out(run, rank) - own) * run.dtype_bytes
    return ends + layers + shards


def _idle_bytes(run: Run, rank: int, gathered: float) -> float:
    """Bytes that are free between the loss and the last block's backward.

    Of the gathered ones those of the ends, and the part of the sums that waits for the
    embedding's gradient.
    """
    if run.execution.eager or run.loops_over_ticks:
        return 0.0
    ends = min(gathered, end_parameters(run, rank) * run.dtype_bytes)
    split = run.layout.zero >= run.split_from["gradient"]
    shards = run.state_shards if split else 1
    if run.layout.runs_in_ticks or (run.workload.tied and shards == 1):
        return ends
    return ends + table_parameters(run) * run.execution.gradient_bytes / shards


def least_working_bytes(run: Run, rank: int) -> float:
    """Return the least bytes of a rank's backward: whatever its blocks recompute.

    In ticks, also whatever their number.
    """
    gathered = _gathered_bytes(run, rank)
    if run.execution.eager or not run.layout.runs_in_ticks:
        return gathered - _idle_bytes(run, rank, gathered) + scanned_weights_bytes(run)
    if run.layout.stage > 1:
        return gathered + tick_ends_bytes(run, rank, tables=0)
    ends = min(gathered, end_parameters(run, rank) * run.dtype_bytes)
    return gathered - ends + tick_ends_bytes(run, rank, tables=1)


def least_state_bytes(run: Run, rank: int) -> float:
    """Return a rank's parameters, gradients and state, and what any backward needs."""
    layout, parameters, own = (
        run.layout,
        rank_parameters(run, rank),
        shared_out(run, rank),
    )
    weight_bytes, state_bytes = stored_bytes(run)
    if layout.optimizer_memory == "host":
        state_bytes = 0
    split_from = run.split_from
    if layout.zero == 3 and run.gathers_once:
        split_from["gradient"] = 4  # whole until the step's end
    each = {
        "weight": weight_bytes,
        "gradient": run.execution.gradient_bytes,
        "state": state_bytes,
    }
    states = (
        size * (own if layout.zero >= split_from[name] else parameters)
        for name, size in each.items()
    )
    return sum(states) + least_working_bytes(run, rank)


def _ends_bytes(run: Run, *, split: bool) -> float:
    """Bytes of tables of gradients, without those that are part of the sums."""
    table = table_parameters(run)
    tables = 3 if run.workload.tied else 2
    if not split:
        tables -= 1 if run.workload.tied else 2
    return tables * table * run.execution.gradient_bytes
