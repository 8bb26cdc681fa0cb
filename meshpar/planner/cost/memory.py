"""Bytes per device: parameters, gradients, optimizer, activations, workspace."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from meshpar.hardware.attention_kernels import SPLASH_LANES
from meshpar.layout import STAGE_REMATS, Layout
from meshpar.layout.layout import is_named
from meshpar.parallel.sizes import HIDDEN_BYTES, SCORE_BYTES, head_parts, tile_tokens
from meshpar.planner.cost.activations import (
    everything_bytes,
    gate_up_values,
    kept_bytes,
    mlp_values,
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
    def reserve_bytes(self) -> float:
        """Bytes that the allocator holds besides all that is counted."""
        kept = self.parameter_bytes + self.optimizer_bytes
        return (kept + self.temporary_bytes) * self.reserve

    @property
    def total_bytes(self) -> float:
        """Bytes of the device in all."""
        kept = self.parameter_bytes + self.optimizer_bytes
        return kept + self.temporary_bytes + self.reserve_bytes

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
        activation_bytes=kept * in_flight + boundary,
        boundary_bytes=boundary,
        logit_bytes=_logit_bytes(run) if has_head else 0.0,
        late_bytes=gradients if once else 0.0,
        gathered_bytes=gathered,
        idle_bytes=_idle_bytes(run, rank, gathered),
        workspace_bytes=_workspace_bytes(run, rank, layers, kept)
        + _stash_copy_bytes(run, stash / layout.chunks, layers),
        ends_bytes=_ends_bytes(run, split=shares["gradient"] < 1) if once else 0.0,
        stage=rank,
        in_flight=in_flight,
        reserve=execution.reserve,
        stash_bytes=stash * pending_w,
        pending_w=pending_w if stash else 0.0,
    )


def _logit_bytes(run: Run) -> float:
    tokens: float = run.tokens
    if run.execution.shared_ends:
        tokens /= run.layout.stage
    values = tokens * run.workload.vocab / run.layout.tensor
    if not run.execution.eager and run.workload.logits_bytes:
        values = min(values, run.workload.logits_bytes / 4)
    table = 0.0
    if not run.execution.eager and not run.layout.runs_in_ticks:
        # The gradient of the head's table, whole until the loss is done.
        table = table_parameters(run)
    logits = values * run.execution.logit_bytes
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
    layout, execution = run.layout, run.execution
    split = run.splits_parameters
    wide = layout.param_dtype == "fp32"
    cast = not execution.eager and layout.precision == "bf16" and wide
    if not split and not cast:
        return 0.0
    whole = rank_parameters(run, rank) * run.dtype_bytes
    if split and run.gathers_once:
        return whole
    ends = end_parameters(run, rank) * run.dtype_bytes
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
    """Part of the gathered bytes that is free again after the loss."""
    if run.execution.eager or run.layout.runs_in_ticks:
        return 0.0
    return min(gathered, end_parameters(run, rank) * run.dtype_bytes)


def least_working_bytes(run: Run, rank: int) -> float:
    """Return the bytes of a rank's backward whatever its blocks recompute."""
    gathered = _gathered_bytes(run, rank)
    busy = gathered - _idle_bytes(run, rank, gathered)
    if run.execution.eager or not run.layout.runs_in_ticks:
        return busy
    return busy + _tick_ends_bytes(run, rank)


def _tick_ends_bytes(run: Run, rank: int) -> float:
    """Bytes of the ends' gradients in a tick: their whole sums, and two tables.

    Those are of this tick's head and of its embedding.
    """
    gradient_bytes = run.execution.gradient_bytes
    ends = end_parameters(run, rank) * gradient_bytes
    table = table_parameters(run)
    split = run.layout.zero == 3 and not run.gathers_once
    sums = ends * (1 - 1 / run.state_shards) if split else 0.0
    return sums + 2 * table * gradient_bytes


def _ends_bytes(run: Run, *, split: bool) -> float:
    """Bytes of tables of gradients, without those that are part of the sums."""
    table = table_parameters(run)
    tables = 3 if run.workload.tied else 2
    if not split:
        tables -= 1 if run.workload.tied else 2
    return tables * table * run.execution.gradient_bytes


def _workspace_bytes(run: Run, rank: int, layers: list[int], kept: float) -> float:
    """Bytes of one block's residuals where the backward recomputes them, and copies."""
    moe = bool(layers) and run.workload.is_moe(layers[-1])
    again = everything_bytes(run, moe=moe) - in_chunks_bytes(run, moe=moe)
    remat = run.layout.remat
    if run.execution.eager:
        return again if remat == "full" else 0.0
    if remat == "none":
        again = 0.0
    if remat in STAGE_REMATS:
        inner = again if remat == "stage" else stage_input_bytes(run)
        again += inner * len(layers) / run.layout.chunks
    again += scores_at_once(run)
    if not run.layout.runs_in_ticks:
        table = table_parameters(run)
        # The loss makes the gradient of the head's table at once: it is whole until the
        # blocks' backward is done, where ZeRO splits it then.
        split = run.state_shards > 1 and run.layout.zero == 3
        whole = table * run.execution.gradient_bytes if split else 0.0
        late = _late_gradient_bytes(run, layers)
        # A head of its own has it scattered before the first of the others is late.
        return again + (whole + late if run.workload.tied else max(whole, late))
    # What a tick's forward keeps before it has its slot.
    return again + kept / run.layout.chunks + _tick_ends_bytes(run, rank)


def _stash_copy_bytes(run: Run, stash: float, layers: list[int]) -> float:
    """Bytes of a stash of a stage, before it is in its slot.

    In lock step a loop over the stage's layers stacks it; where ranks diverge each
    layer writes its own part of the slot.
    """
    if not run.layout.divergent:
        return stash
    return max(stash_bytes(run, moe=run.workload.is_moe(at)) for at in layers)


def _late_gradient_bytes(run: Run, layers: list[int]) -> float:
    """Bytes of a block's gradients that are reduced while the next block runs.

    By `meshpar.parallel.prefetch`; the next block's parameters are among those
    gathered.
    """
    if not run.prefetches or run.replicas * run.layout.context == 1:
        return 0.0
    moe = bool(layers) and run.workload.is_moe(layers[-1])
    return block_parameters(run, moe=moe) * run.dtype_bytes


_FP32_BYTES = 4


def in_chunks_bytes(run: Run, *, moe: bool, remat: str = "") -> float:
    """Return the bytes of an MLP's hidden values that never exist at once.

    The backward recomputes them for a chunk of tokens at a time
    (`meshpar.parallel.remat`). Less the weights, which several chunks read in
    fp32.
    """
    remat = remat or run.layout.remat
    recomputed = remat in ("full", "stage_full") or is_named(remat)
    ours = not run.execution.eager and not moe
    if not (recomputed and ours) or run.layout.sequence_parallel:
        return 0.0
    each = run.tokens * run.dtype_bytes / run.layout.tensor
    chunks = -(-each * gate_up_values(run, moe) // HIDDEN_BYTES)
    if chunks <= 1:
        return 0.0
    weights = run.workload.mlp_matrix_parameters(run.workload.ffn) / run.layout.tensor
    copies = _FP32_BYTES * weights if run.dtype_bytes < _FP32_BYTES else 0.0
    return each * mlp_values(run, moe) * (1 - 1 / chunks) - copies


def scores_at_once(run: Run) -> float:
    """Bytes of the gradients of some heads' scores in fp32, and cast for a matmul.

    As XLA:GPU and XLA:TPU compile `meshpar.models.layers.causal_attention`; fused
    kernels store none.
    """
    if run.attention.kernel == "splash":
        # Its kernel writes each fp32 log-sum-exp once for every lane.
        rows = run.tokens * run.workload.heads / run.layout.tensor
        return rows * SPLASH_LANES * _FP32_BYTES
    if run.fused_attention:
        return 0.0
    if run.tiled_attention:
        return _tile_bytes(run)
    whole = _FP32_BYTES * run.tokens * run.seq * run.workload.heads / run.layout.tensor
    # A key/value head's at least.
    kv_heads = max(1.0, run.workload.kv_heads / run.layout.tensor)
    widths = (_FP32_BYTES + run.dtype_bytes) / _FP32_BYTES
    return widths * max(min(whole, SCORE_BYTES), whole / kv_heads)


def _tile_bytes(run: Run) -> float:
    """Bytes of a tile's scores, softmax and their gradients; and of arrays in tiles.

    Queries, and the gradients of the output and of the queries, exist in tiles besides
    themselves; keys, values and their fp32 gradients of some heads exist twice where
    they go round a ring: those in use, and those on their way.
    """
    workload, how = run.workload, run.layout.attention_method
    split = run.layout.tensor * how.heads
    heads, kv_heads = (max(1, n // split) for n in (workload.heads, workload.kv_heads))
    tokens = run.seq // run.layout.context * how.heads
    head_values = run.microbatch * tokens * workload.value_dim
    key_bytes = kv_heads * head_values * run.dtype_bytes
    parts = head_parts(kv_heads, key_bytes, how.groups, gathers=how.across.gathers)
    rows = run.microbatch * heads // parts
    largest = run.platform.largest_tile
    tile = tile_tokens(tokens, rows, zigzag=how.groups > 1, largest=largest)
    queries = heads * head_values
    moved = (2 if how.groups > 1 else 1) * 2 * kv_heads * head_values / parts
    return (
        4 * _FP32_BYTES * rows * tile * tile
        + 3 * queries * run.dtype_bytes
        + _FP32_BYTES * queries / parts
        + moved * (run.dtype_bytes + _FP32_BYTES)
    )
