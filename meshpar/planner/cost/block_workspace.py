"""Bytes that a block's backward needs at once, less what is made in pieces."""

from __future__ import annotations

from meshpar.attention_tiles import head_parts, tile_tokens
from meshpar.chunk_bytes import HIDDEN_BYTES, SCORE_BYTES
from meshpar.hardware.attention_choice import SPLASH_LANES
from meshpar.planner.cost.run import Run
from meshpar.planner.workload.activations import gate_up_values, mlp_values

_FP32_BYTES = 4


def in_chunks_bytes(run: Run, *, moe: bool) -> float:
    """Of an MLP's hidden values, those that are not there at once.

    Where the backward makes them again, it makes a chunk of tokens at a time
    (`meshpar.parallel.token_chunks`). Less the weights, which several chunks read in
    fp32.
    """
    named = run.layout.residual_names is not None
    recomputed = run.layout.remat in ("full", "stage_full") or named
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
    """Gradients of some heads' scores in fp32, and cast for the next matmul.

    As XLA:GPU and XLA:TPU compile `meshpar.models.layers.causal_attention`. Kernels
    make none.
    """
    if run.attention.kernel == "splash":
        # Its kernel writes each fp32 log-sum-exp once for every lane.
        rows = run.tokens * run.workload.heads / run.layout.tensor
        return rows * SPLASH_LANES * _FP32_BYTES
    if run.fused_attention:
        return 0.0
    if run.tiled_attention:
        return _of_tiles(run)
    whole = _FP32_BYTES * run.tokens * run.seq * run.workload.heads / run.layout.tensor
    # A key/value head's at least.
    kv_heads = max(1.0, run.workload.kv_heads / run.layout.tensor)
    widths = (_FP32_BYTES + run.dtype_bytes) / _FP32_BYTES
    return widths * max(min(whole, SCORE_BYTES), whole / kv_heads)


def _of_tiles(run: Run) -> float:
    """Scores, softmax and the gradients of both, of a tile; and arrays in tiles.

    Queries, and the gradients of the output and of the queries, are there in tiles
    beside themselves; keys, values and their fp32 gradients of some heads twice where
    they go round a ring: those that are met, and those on their way.
    """
    workload, how = run.workload, run.layout.attention_method
    split = run.layout.tensor * how.heads
    heads, kv_heads = (max(1, n // split) for n in (workload.heads, workload.kv_heads))
    tokens = run.seq // run.layout.context * how.heads
    of_head = run.microbatch * tokens * workload.value_dim
    key_bytes = kv_heads * of_head * run.dtype_bytes
    parts = head_parts(kv_heads, key_bytes, how.groups, how.across)
    rows = run.microbatch * heads // parts
    tile = tile_tokens(tokens, rows, zigzag=how.groups > 1)
    queries = heads * of_head
    moved = (2 if how.groups > 1 else 1) * 2 * kv_heads * of_head / parts
    return (
        4 * _FP32_BYTES * rows * tile * tile
        + 3 * queries * run.dtype_bytes
        + _FP32_BYTES * queries / parts
        + moved * (run.dtype_bytes + _FP32_BYTES)
    )
