"""Bytes of a block's backward at its fullest moment, beside what forwards kept.

The counts follow the buffers of programs that XLA compiled (`compiled_memory.json`).
The fullest moment of a block is the backward of its attention: what it recomputed lies
there, and the MLP's gradient, since gradients of weights come last. Programs that run
operation by operation have their own count (`workspace_bytes`).
"""

from __future__ import annotations

from meshpar.hardware.attention_kernels import SPLASH_LANES
from meshpar.layout import STAGE_REMATS
from meshpar.layout.layout import is_named
from meshpar.parallel.sizes import (
    HIDDEN_BYTES,
    head_parts,
    score_parts,
    tile_tokens,
)
from meshpar.planner.cost.activations import (
    active_ffn,
    everything_bytes,
    gate_up_values,
    kept_bytes,
    mlp_values,
    projections,
    stage_input_bytes,
    stash_bytes,
)
from meshpar.planner.cost.run import (
    Run,
    block_parameters,
    end_parameters,
    rank_parameters,
    table_parameters,
)

_FP32_BYTES = 4

_TURNED_TABLES = 2
"""Tables at once while the head's gradient is turned or cut for its reduction."""

_SENT_TABLES = 1.25
"""The same while it is sent, in four parts, of which the first has arrived."""


def workspace_bytes(run: Run, rank: int, layers: list[int], kept: float) -> float:
    """Return the bytes of one block's backward at its fullest moment.

    Args:
        run: The run.
        rank: A rank of `stage`.
        layers: Its layers.
        kept: Bytes that its blocks keep of one microbatch.
    """
    moe = bool(layers) and run.workload.is_moe(layers[-1])
    again = recomputed_bytes(run, moe=moe)
    remat = run.layout.remat
    if run.execution.eager:
        return again if remat == "full" else 0.0
    if remat == "none":
        again = 0.0
    if remat in STAGE_REMATS:
        inner = again if remat == "stage" else stage_input_bytes(run)
        again += inner * len(layers) / run.layout.chunks
    if not run.workload.traced:  # whose trace has gradients too
        again += _mlp_gradient_bytes(run, moe=moe) + _attention_gradient_bytes(run)
    if run.scans_blocks:
        return again + scanned_weights_bytes(run) + scores_at_once(run)
    if not run.layout.runs_in_ticks:
        again += _other_softmax_bytes(run, layers)
        return again + _head_and_block_bytes(run, layers, moe=moe)
    # What a tick's forward keeps before it has its slot.
    again += scores_at_once(run) + kept / run.layout.chunks
    table = table_parameters(run) * run.execution.gradient_bytes
    if not run.loops_over_ticks:
        # At a microbatch's end its gradients are added, of a tied table twice: terms
        # and one sum more than is kept lie beside one another.
        again = max(again, (3 if run.workload.tied else 2) * table)
    elif not _loops_over_logits(run):
        # The head's gradient comes last too, in the blocks' dtype first.
        logits = logits_at_once(run) * run.dtype_bytes
        product = table_parameters(run) * run.dtype_bytes
        again = max(again + logits, 2 * table + product)
    elif run.layout.stage == 1 and not run.workload.tied:
        again += table_parameters(run) * run.dtype_bytes  # turned for its backwards
    tables = 0
    if _loops_over_logits(run):
        # This tick's head's and, in a loop, one that is ready for the embedding's.
        tables = 2 if run.loops_over_ticks else 1
    ends = tick_ends_bytes(run, rank, tables=tables)
    return again + ends + _scattered_bytes(run, rank)


def scanned_weights_bytes(run: Run) -> float:
    """Return the bytes of a block's weights as a turn of a loop over blocks has them.

    Gathered or cast; the loss, before the backward's loop, has none.
    """
    if not (run.scans_blocks and (run.splits_parameters or run.casts_parameters)):
        return 0.0
    moe = run.workload.is_moe(run.workload.layers)
    return block_parameters(run, moe=moe) * run.dtype_bytes


def logits_at_once(run: Run) -> float:
    """Return the number of logits that a device makes at a time."""
    logits = _tick_logits(run)
    if run.execution.eager or not run.workload.logits_bytes:
        return logits
    return min(logits, run.workload.logits_bytes / _FP32_BYTES)


def _tick_logits(run: Run) -> float:
    """Number of a microbatch's logits on one device."""
    shares = run.layout.stage if run.execution.shared_ends else 1
    return run.tokens / shares * run.workload.vocab / run.layout.tensor


def _loops_over_logits(run: Run) -> bool:
    """Return True if the loss adds up the head's gradient, chunk by chunk."""
    return run.layout.stage == 1 or logits_at_once(run) < _tick_logits(run)


def _scattered_bytes(run: Run, rank: int) -> float:
    """Bytes of a pipeline's sums as ZeRO splits them, made before the first tick."""
    layout = run.layout
    if layout.stage == 1 or layout.zero < 3 or not run.gathers_once:
        return 0.0
    if run.state_shards == 1:
        return 0.0
    blocks = rank_parameters(run, rank) - end_parameters(run, rank)
    return blocks / run.state_shards * run.execution.gradient_bytes


def recomputed_bytes(run: Run, *, moe: bool, remat: str = "") -> float:
    """Return the bytes that a block's backward makes again, besides what is kept.

    Under the remat policy of the run's layout when absent, here and below.
    """
    if run.workload.traced and not run.execution.eager:
        everything = _traced_bytes(run) + stage_input_bytes(run)
    else:
        everything = everything_bytes(run, moe=moe)
    everything -= in_chunks_bytes(run, moe=moe, remat=remat)
    if run.execution.eager:
        return everything
    parts = 0.0
    if run.num_parts > 1:
        # One part of the batch has its MLP's values at a time.
        values = run.tokens * run.dtype_bytes / run.layout.tensor
        parts = values * mlp_values(run, moe) * (1 - 1 / run.num_parts)
    kept = kept_bytes(run, moe=moe, remat=remat, fullest=True)
    return max(0.0, everything - parts - kept)


def _traced_bytes(run: Run) -> float:
    """Bytes of the fullest traced block's backward, besides its input and scores.

    XLA:GPU makes gradients of weights last, XLA:TPU where the trace has them. `tensor`
    splits all but what is as wide as the stream.
    """
    traced, tensor = run.workload.traced, run.layout.tensor
    assert traced is not None
    scores = run.stores_softmax
    each, stream = traced.backward(not run.platform.has_own_xla, scores)
    if scores and num_attentions(run):
        # The trace has one example, with the gradients of scores in fp32 and cast.
        rows = run.workload.heads * traced.seq
        each -= (
            rows * (_FP32_BYTES + traced.residual_dtype_bytes) / _score_parts(run, 1)
        )
    split = (each - stream) / tensor + stream * run.residual_share
    return run.tokens * split * run.dtype_bytes / traced.residual_dtype_bytes


def _mlp_gradient_bytes(run: Run, *, moe: bool) -> float:
    """Bytes of the gradient of an MLP's first matmul, beside attention's backward.

    Where the hidden values are recomputed they are gone by then.
    """
    if run.layout.remat == "none" or moe or in_chunks_bytes(run, moe=moe):
        return 0.0
    values = gate_up_values(run, moe)
    if run.layout.remat in ("full", *STAGE_REMATS):
        values -= active_ffn(run, moe)
    each = run.tokens * run.dtype_bytes / run.layout.tensor
    return each * values / run.num_parts


def _attention_gradient_bytes(run: Run) -> float:
    """Bytes of the gradients of arrays of a block that lie beside its scores.

    Of the residual stream there are two, behind the block and behind attention, whose
    own output is free again; of heads that of their mixed values. Where a loop over
    parts of the heads, or a kernel, writes them, those of queries, keys and values.
    """
    workload, each = run.workload, run.tokens * run.dtype_bytes / run.layout.tensor
    heads: float = workload.heads * workload.value_dim
    if run.fused_attention or run.tiled_attention or num_score_parts(run) > 1:
        heads += projections(run)
    gradients = stage_input_bytes(run) + each * heads
    if run.layout.runs_in_ticks or workload.experts:
        return gradients
    if not (run.splits_parameters or run.casts_parameters):
        return gradients
    # The block's own weights are counted whole, of which those of its MLP are free.
    matrices = workload.mlp_matrix_parameters(workload.ffn) / run.layout.tensor
    return gradients - matrices * run.dtype_bytes


def _other_softmax_bytes(run: Run, layers: list[int]) -> float:
    """Bytes of the softmax of the other one of two blocks, or of two attentions.

    A loop over one block is none to XLA, which then makes room at once for the softmax
    of both, where loops over parts of the heads fill them. Of two attentions in a block
    it makes equal room once, and copies it: that of softmax and of queries, keys and
    values, or their gradients.
    """
    if run.num_parts > 1 or not run.prefetches or not run.stores_softmax:
        return 0.0
    if num_score_parts(run) == 1:
        return 0.0
    scores = run.seq * run.workload.heads
    several = num_attentions(run) > 1
    values: float = scores if len(layers) == 2 or several else 0
    if several:
        values += projections(run)
    return run.tokens * values * run.dtype_bytes / run.layout.tensor


def _head_and_block_bytes(run: Run, layers: list[int], *, moe: bool) -> float:
    """Most bytes at once of the head's gradient, attention, and a block's gradients.

    The loss makes the gradient of the head's table at once, whole. Where ZeRO splits it
    a head of its own is sent beside the last block's backward; a tied one is whole
    until the embedding's is there.
    """
    scores = scores_at_once(run)
    table = table_parameters(run) * run.execution.gradient_bytes
    splits = run.state_shards > 1 and run.layout.zero >= run.split_from["gradient"]
    own_layer = block_parameters(run, moe=moe) * run.dtype_bytes
    late = _late_gradient_bytes(run, own_layer)
    if not splits:
        return late + scores
    if run.workload.tied:
        return table + late + scores
    # Beside the last block's backward, whose next weights are not yet gathered.
    if run.platform.scatter_columns > 1:  # joined, and not turned (`parallel.zero`)
        return max(late + scores, table + scores - own_layer)
    sent = _SENT_TABLES * table + max(scores, _turned_weights_bytes(run, layers))
    turned = _TURNED_TABLES * table
    return max(late + scores, max(sent, turned) - own_layer)


def _turned_weights_bytes(run: Run, layers: list[int]) -> float:
    """Bytes of a second copy of the gates' weights that a forward gathered and kept.

    ZeRO-1 and 2 keep them for the backwards, before which XLA turns all of them.
    """
    workload = run.workload
    if not workload.gated or not run.prefetches or run.layout.zero == 3:
        return 0.0
    each = 2 * workload.hidden * workload.ffn / run.layout.tensor
    dense = sum(not workload.is_moe(layer) for layer in layers[:-1])
    return dense * each * run.dtype_bytes


def tick_ends_bytes(run: Run, rank: int, *, tables: int) -> float:
    """Return the bytes of the gradients of the ends, in a tick, beside a block.

    Args:
        run: The run.
        rank: A rank of `stage`.
        tables: Tables of gradients besides the sums, which are whole.
    """
    gradient_bytes = run.execution.gradient_bytes
    ends = end_parameters(run, rank) * gradient_bytes
    split = run.layout.zero == 3 and not run.gathers_once
    sums = ends * (1 - 1 / run.state_shards) if split else 0.0
    return sums + tables * table_parameters(run) * gradient_bytes


def stash_copy_bytes(run: Run, stash: float, layers: list[int]) -> float:
    """Return the bytes of a stash of a stage, before it is in its slot.

    In lock step a loop over the stage's layers stacks it; where ranks diverge each
    layer writes its own part of the slot.
    """
    if not run.layout.divergent:
        return stash
    return max(stash_bytes(run, moe=run.workload.is_moe(at)) for at in layers)


def _late_gradient_bytes(run: Run, block_bytes: float) -> float:
    """Bytes of a block's gradients that are reduced while the next block runs.

    By `meshpar.parallel.prefetch`; the next block's parameters are among those
    gathered.
    """
    late = run.prefetches and run.replicas * run.layout.context > 1
    return block_bytes if late else 0.0


def in_chunks_bytes(run: Run, *, moe: bool, remat: str = "") -> float:
    """Return the bytes of an MLP's hidden values that never exist at once.

    The backward recomputes them for a chunk of tokens at a time
    (`meshpar.parallel.remat`). Less the weights, which several chunks read in
    fp32.
    """
    remat = remat or run.layout.remat
    recomputed = remat in ("full", "stage_full") or is_named(remat)
    execution = run.execution
    ours = not (execution.eager or execution.scans_blocks or moe)
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
    """Return the bytes of the gradients of some heads' scores, in fp32 and cast.

    As XLA:GPU and XLA:TPU compile `meshpar.models.layers.causal_attention`; fused
    kernels store none.
    """
    if not num_attentions(run):
        return 0.0
    if run.attention.kernel == "splash":
        return _splash_bytes(run)
    if run.fused_attention:
        return 0.0
    if run.tiled_attention:
        return _tile_bytes(run)
    parts = num_score_parts(run)
    heads = run.workload.heads / run.layout.tensor
    scores = run.tokens / run.num_parts * run.seq * heads / parts
    # In a loop over parts each one's softmax is cut out of all.
    cut = run.dtype_bytes if parts > 1 else 0
    return scores * (_FP32_BYTES + run.dtype_bytes + cut)


def _splash_bytes(run: Run) -> float:
    """Bytes that splash attention's kernels add, of every attention of a block.

    They write each fp32 log-sum-exp once for every lane, and their arrays of narrower
    heads are padded to all lanes: queries, keys, values and what they mix, which every
    attention makes again, and the gradients of one attention's.
    """
    workload, attentions = run.workload, num_attentions(run)
    tokens = run.tokens / run.layout.tensor
    log_sums = tokens * workload.heads * SPLASH_LANES * _FP32_BYTES
    heads = 2 * (workload.heads + workload.kv_heads)
    padding = max(0, SPLASH_LANES - workload.query_dim) * run.dtype_bytes
    return attentions * log_sums + (attentions + 1) * tokens * heads * padding


def num_attentions(run: Run) -> int:
    """Return the number of attentions of the block that needs most."""
    traced = run.workload.traced
    if not traced:
        return 1
    softmax = run.workload.heads * traced.seq * traced.residual_dtype_bytes
    return round(traced.score_bytes() / softmax)


def num_score_parts(run: Run) -> int:
    """Return the parts of the heads that attend one after another."""
    return _score_parts(run, max(1, run.microbatch // run.num_parts))


def _score_parts(run: Run, examples: int) -> int:
    tensor = run.layout.tensor
    heads, kv_heads = (
        max(1, n // tensor) for n in (run.workload.heads, run.workload.kv_heads)
    )
    scores = examples * (heads // kv_heads) * run.seq**2
    return score_parts(_FP32_BYTES * scores, kv_heads)


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
