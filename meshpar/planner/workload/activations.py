"""Bytes of activations that one block keeps for its backward.

Reference: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", section 4, whose counts come out exactly; other blocks (gated,
grouped heads, experts, fused attention) are counted in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshpar.layout import STAGE_REMATS
from meshpar.layout.residual_names import BLOCK_INPUT, ResidualNames, is_named
from meshpar.planner.cost.run import Run
from meshpar.planner.workload.workload import TracedBlock


def kept_bytes(run: Run, *, moe: bool) -> float:
    """Return the bytes a block keeps of one microbatch, under the remat policy."""
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
    """Return the bytes of one microbatch that a block moves to the host and back."""
    names = run.layout.residual_names
    if names is None or not names.offload:
        return 0.0
    saved = _compiled_bytes(run, "save:" + "/".join(names.offload), moe=moe)
    inside = max(0.0, saved - _compiled_bytes(run, "full", moe=moe))
    whole = stage_input_bytes(run) if BLOCK_INPUT in names.offload else 0.0
    return inside + whole


def everything_bytes(run: Run, *, moe: bool) -> float:
    """Return the bytes a block keeps of one microbatch without recomputation.

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
    mixed = workload.heads * workload.value_dim
    inside = (_projections(run) + mixed + mlp_values(run, moe)) * values
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
    """Return the bytes of the softmax, and with dropout of its mask and result."""
    if not run.stores_softmax:
        return 0.0
    each = run.dtype_bytes * (2 if run.execution.dropout else 1)
    each += 1 if run.execution.dropout else 0
    return each * run.tokens * run.seq * run.workload.heads / run.layout.tensor


def _compiled_bytes(run: Run, remat: str, *, moe: bool) -> float:
    """Bytes that our blocks keep (`block_activations`); experts as one MLP."""
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
        remat=_as_dense(remat) if moe else remat,
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


def _as_dense(remat: str) -> str:
    """Return the policy with the experts' residual names replaced by an MLP's.

    `dots` keeps no matmuls of the loop over tiles.
    """
    if remat == "dots":
        return "save:attention_qkv/attention_out"
    return remat.replace("mlp_", "shared_").replace("experts_gate_up", "mlp_gate_up")


def _traced_bytes(run: Run, traced: TracedBlock, remat: str) -> float:
    """Bytes of the traced residuals; the residual stream is whole over `tensor`."""
    each = traced.residual_bytes[remat] * run.dtype_bytes / traced.residual_dtype_bytes
    stream = run.workload.hidden * run.dtype_bytes
    split = max(0.0, each - stream) / run.layout.tensor
    return run.tokens * split + stage_input_bytes(run)


def stage_input_bytes(run: Run) -> float:
    """Return the bytes of the input of a block, or of a stage."""
    return run.residual_bytes * run.residual_share


def _projections(run: Run) -> float:
    """Number of values of queries, keys and values of one token."""
    workload = run.workload
    if not workload.kv_lora_rank:
        return (workload.heads + 2 * workload.kv_heads) * workload.head_dim
    # Each head has its own once expanded, and the compressed ones are kept too.
    wide = workload.heads * (2 * workload.query_dim + workload.value_dim)
    narrow = workload.q_lora_rank + workload.kv_lora_rank + workload.qk_rope_head_dim
    return wide + narrow * run.layout.tensor


def _active_ffn(run: Run, moe: bool) -> int:
    workload = run.workload
    if not moe:
        return workload.ffn
    return workload.expert_ffn * (workload.top_k + workload.shared_experts)


def gate_up_values(run: Run, moe: bool) -> float:
    """Return the number of values that an MLP's first matmul makes of one token."""
    return _active_ffn(run, moe) * (2 if run.workload.gated else 1)


def mlp_values(run: Run, moe: bool) -> float:
    """Return the number of values around an MLP's activation, of one token.

    Its input and output; the gate's own output where not fused.
    """
    hidden = 1.0
    if run.workload.gated and not run.execution.fused_activation:
        hidden = 2.0
    return gate_up_values(run, moe) + hidden * _active_ffn(run, moe)


def _router_bytes(run: Run, moe: bool) -> float:
    """Bytes of tokens in the order of their experts, in and out, and of scores."""
    if not moe:
        return 0.0
    workload = run.workload
    routed = 2 * workload.top_k * workload.hidden * run.dtype_bytes
    return run.tokens * (routed + 4 * workload.experts) / run.layout.tensor


OF_MATMULS = ("attention_qkv", "attention_out", "mlp_up", "mlp_gate_up")
"""The named residuals that a matmul with weights makes."""

_FP32_BYTES = 4
_MASK_BYTES = 1


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """The sizes of a block that its activations depend on.

    Args:
        embed: Size of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Size of a head.
        ffn: Hidden size of the MLP.
        gated: True if the MLP has a gate beside `up` (SwiGLU).
        dropout: True if both branches drop values.
    """

    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool = False
    dropout: bool = False


@dataclass(frozen=True, kw_only=True)
class Residual:
    """An array that a block makes.

    Args:
        name: Name in `remat=save:NAME`, if it has one there.
        bytes_per_token: Bytes of one token, on one device alone.
        along: Axis that splits it: `tensor`, or `residual` for the tensor axis under
            sequence parallelism only.
    """

    name: str
    bytes_per_token: float
    along: str


def block_activations(
    block: BlockShape, seq: int, *, value_bytes: int = 2, fused_attention: bool = False
) -> tuple[Residual, ...]:
    """Return all that a block keeps without remat, in the order in which it is made.

    Args:
        block: The block; norms on queries and keys are not counted.
        seq: Tokens of a sequence.
        value_bytes: Bytes of a value of the compute dtype.
        fused_attention: True if a fused kernel keeps the fp32 log of each softmax's sum
            instead of the softmax (Dao et al. 2022, section 3.1).
    """
    heads = block.heads * block.head_dim
    qkv = heads + 2 * block.kv_heads * block.head_dim
    up = (2 if block.gated else 1) * block.ffn
    scores = block.heads * (_FP32_BYTES if fused_attention else seq * value_bytes)

    def residual(name: str, values: int, along: str) -> Residual:
        return Residual(name=name, bytes_per_token=values * value_bytes, along=along)

    masks = 2 * _MASK_BYTES * block.embed if block.dropout else 0
    return (
        residual("x", block.embed, "residual"),
        residual("attention_normed", block.embed, "residual"),
        residual("attention_qkv", qkv, "tensor"),
        Residual(name="scores", bytes_per_token=scores, along="tensor"),
        residual("attention_mixed", heads, "tensor"),
        residual("attention_out", block.embed, "residual"),
        residual("mlp_normed", block.embed, "residual"),
        residual("mlp_gate_up" if block.gated else "mlp_up", up, "tensor"),
        residual("mlp_hidden", block.ffn, "tensor"),
        Residual(name="masks", bytes_per_token=masks, along="residual"),
    )


@lru_cache(maxsize=4096)
def block_activation_bytes(
    block: BlockShape,
    *,
    batch: int,
    seq: int,
    remat: str = "none",
    tensor: int = 1,
    sequence_parallel: bool = False,
    value_bytes: int = 2,
    fused_attention: bool = False,
) -> float:
    """Return the bytes a block keeps of `batch` sequences on each of `tensor` devices.

    Args:
        block: The block.
        batch: Sequences of one microbatch on one device.
        seq: Tokens of a sequence.
        remat: `Layout.remat`; residuals that it offloads are not on the device.
        tensor: Devices that split the block's matmuls.
        sequence_parallel: True if they split the residual stream too.
        value_bytes: Bytes of a value of the compute dtype: 2 for bf16.
        fused_attention: As for `block_activations`.

    Example:
        >>> gpt3 = BlockShape(
        ...     embed=12288, heads=96, kv_heads=96, head_dim=128, ffn=4 * 12288
        ... )
        >>> sbh = 2048 * 1 * 12288
        >>> block_activation_bytes(gpt3, batch=1, seq=2048) / sbh
        64.0
        >>> block_activation_bytes(
        ...     gpt3, batch=1, seq=2048, remat="selective", tensor=8
        ... ) / sbh
        11.0
    """
    degrees = {"tensor": tensor, "residual": tensor if sequence_parallel else 1}
    activations = block_activations(
        block, seq, value_bytes=value_bytes, fused_attention=fused_attention
    )
    return sum(
        batch * seq * one.bytes_per_token / degrees[one.along]
        for one in activations
        if _is_kept(one.name, remat)
    )


def _is_kept(name: str, remat: str) -> bool:
    named = ResidualNames.parse(remat) if is_named(remat) else ResidualNames()
    if name == "x":
        return BLOCK_INPUT not in named.offload
    if remat == "none":
        return True
    if remat == "selective":
        return name not in ("scores", "masks")
    if remat == "dots":
        return name in OF_MATMULS
    return name in named.save
