"""Bytes of activations that one block keeps for its backward.

Reference: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", section 4, whose counts come out exactly; other blocks (gated,
grouped heads, experts, fused attention) are counted in the same way.
"""

from __future__ import annotations

from meshpar.layout import STAGE_REMATS
from meshpar.planner.cost.run import Run
from meshpar.planner.workload.block_activations import (
    BlockShape,
    block_activation_bytes,
)
from meshpar.planner.workload.traced_block import TracedBlock
from meshpar.residual_names import BLOCK_INPUT


def kept_bytes(run: Run, *, moe: bool) -> float:
    """Of one microbatch on one device, under the remat policy."""
    remat = run.layout.remat
    if remat in STAGE_REMATS:
        return 0.0  # the stage's input alone: `stage_input_bytes`
    traced = run.workload.traced
    if traced and remat in traced.residual_bytes:
        return _traced_bytes(run, traced, remat)
    if not run.execution.eager:
        return _compiled_bytes(run, remat, moe=moe)
    if remat == "full":
        return stage_input_bytes(run)
    if remat == "none":
        return everything_bytes(run, moe=moe)
    if remat == "selective":
        return everything_bytes(run, moe=moe) - scores_bytes(run)
    kept = _projections(run) + gate_up_values(run, moe)
    each = kept * run.dtype_bytes / run.layout.tensor
    return run.tokens * each + 2 * stage_input_bytes(run)


def offloaded_bytes(run: Run, *, moe: bool) -> float:
    """Of one microbatch, what a block moves to the host's memory and gets back."""
    names = run.layout.residual_names
    if names is None or not names.offload:
        return 0.0
    saved = _compiled_bytes(run, "save:" + "/".join(names.offload), moe=moe)
    inside = max(0.0, saved - _compiled_bytes(run, "full", moe=moe))
    whole = stage_input_bytes(run) if BLOCK_INPUT in names.offload else 0.0
    return inside + whole


def everything_bytes(run: Run, *, moe: bool) -> float:
    """What every operation of the block needs, nothing recomputed.

    For a GPT block with dropout, 16-bit values and scores that are stored:

        s b h (10 + 24 / t + 5 a s / (h t))

    with s tokens of b sequences, h hidden, a heads, t devices of `tensor`; the 10
    divide by t too under sequence parallelism.
    """
    workload, values = run.workload, run.dtype_bytes
    if workload.traced:
        return _traced_bytes(run, workload.traced, "none")
    if not run.execution.eager:
        return _compiled_bytes(run, "none", moe=moe)
    # Input and output of two norms; masks of dropout have a byte a value.
    stream: float = 4 * values * workload.hidden
    stream += 2 * workload.hidden if run.execution.dropout else 0
    inside = (_projections(run) + _mixed(run) + mlp_values(run, moe)) * values
    inside += 4 * workload.heads if run.fused_attention else 0  # log-sums
    tokens = run.tokens
    if run.execution.keeps_gathered:
        stream += 2 * values * workload.hidden * (1 / run.residual_share - 1)
    return (
        tokens * (stream * run.residual_share + inside / run.layout.tensor)
        + scores_bytes(run)
        + _router_bytes(run, moe)
    )


def scores_bytes(run: Run) -> float:
    """Softmax's output, and with dropout its mask and what it leaves."""
    if not run.stores_softmax:
        return 0.0
    each = run.dtype_bytes * (2 if run.execution.dropout else 1)
    each += 1 if run.execution.dropout else 0
    return each * run.tokens * run.seq * run.workload.heads / run.layout.tensor


def _compiled_bytes(run: Run, remat: str, *, moe: bool) -> float:
    """What our blocks keep (`block_activations`); experts as an MLP of their size."""
    workload, layout = run.workload, run.layout
    latent = bool(workload.kv_lora_rank)
    shape = BlockShape(
        embed=workload.hidden,
        heads=workload.heads,
        kv_heads=workload.heads if latent else workload.kv_heads,
        head_dim=workload.value_dim,
        ffn=_active_ffn(run, moe),
        gated=workload.gated,
        dropout=workload.dropout,
    )
    kept = block_activation_bytes(
        shape,
        batch=1,
        seq=run.seq,
        remat=_of_routed(remat) if moe else remat,
        tensor=layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        value_bytes=run.dtype_bytes,
        fused_attention=not run.stores_softmax,
    )
    if latent and remat != "full":
        usual = 3 * workload.heads * workload.value_dim
        more = (_projections(run) - usual) * run.dtype_bytes / layout.tensor
        kept += run.seq * more
    if workload.modulations:
        # Gates need the outputs of both branches, of which one is counted.
        gated = {"none": 2, "dots": 1}.get(remat, 0) * workload.hidden
        kept += run.seq * gated * run.dtype_bytes * run.residual_share
    keeps_rows = remat in ("none", "selective") or "experts_in" in remat
    routed = _router_bytes(run, moe) if keeps_rows else 0.0
    return kept * run.tokens / run.seq + routed


def _of_routed(remat: str) -> str:
    """A policy by the names of an MLP of the experts' size.

    Matmuls in a loop over tiles are none that `dots` keeps.
    """
    if remat == "dots":
        return "save:attention_qkv/attention_out"
    return remat.replace("mlp_", "shared_").replace("experts_gate_up", "mlp_gate_up")


def _traced_bytes(run: Run, traced: TracedBlock, remat: str) -> float:
    """The traced residuals; the residual stream's part is whole over `tensor`."""
    each = traced.residual_bytes[remat] * run.dtype_bytes / traced.residual_dtype_bytes
    stream = run.workload.hidden * run.dtype_bytes
    split = max(0.0, each - stream) / run.layout.tensor
    return run.tokens * split + stage_input_bytes(run)


def stage_input_bytes(run: Run) -> float:
    """Of what enters a block, or a stage."""
    return run.residual_bytes * run.residual_share


def _projections(run: Run) -> float:
    """Values of queries, keys and values of one token."""
    workload = run.workload
    if not workload.kv_lora_rank:
        return (workload.heads + 2 * workload.kv_heads) * workload.head_dim
    # Each head has its own once expanded, and the compressed ones are kept too.
    wide = workload.heads * (2 * workload.query_dim + workload.value_dim)
    narrow = workload.q_lora_rank + workload.kv_lora_rank + workload.qk_rope_head_dim
    return wide + narrow * run.layout.tensor


def _mixed(run: Run) -> float:
    return run.workload.heads * run.workload.value_dim


def _active_ffn(run: Run, moe: bool) -> int:
    workload = run.workload
    if not moe:
        return workload.ffn
    return workload.expert_ffn * (workload.top_k + workload.shared_experts)


def gate_up_values(run: Run, moe: bool) -> float:
    """Of one token, what the first matmul of an MLP makes."""
    return _active_ffn(run, moe) * (2 if run.workload.gated else 1)


def mlp_values(run: Run, moe: bool) -> float:
    """Input and output of the activation; a gate's own output where not fused."""
    hidden = 1.0
    if run.workload.gated and not run.execution.fused_activation:
        hidden = 2.0
    return gate_up_values(run, moe) + hidden * _active_ffn(run, moe)


def _router_bytes(run: Run, moe: bool) -> float:
    """Tokens in the order of their experts, in and out, and the router's scores."""
    if not moe:
        return 0.0
    workload = run.workload
    routed = 2 * workload.top_k * workload.hidden * run.dtype_bytes
    return run.tokens * (routed + 4 * workload.experts) / run.layout.tensor
