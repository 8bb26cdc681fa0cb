"""Activations that one block keeps for its backward, and what the backward recomputes.

The count of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models" (section 4.1 and Table 2), for s tokens of b sequences, h = embed, a
heads, t = tensor, in 16 bits: sbh (34 + 5 as/h) without remat, of which dropout masks
are 2 sbh and those of the scores as^2 b, and their dropped copy 2 as^2 b. Our blocks
drop no scores, and keep a mask for each branch only where the model drops values. So a
GELU block with ffn = 4h keeps

    remat      one device          tensor t                     and sequence parallel
    none       sbh (32 + 2 as/h)   sbh (8 + 24/t + 2 as/(ht))   sbh/t (32 + 2 as/h)
    selective  sbh 32              sbh (8 + 24/t)               sbh 32/t
    full       sbh 2               sbh 2                        sbh 2/t

and 2 sbh more with dropout and `none`; other sizes as `block_activations` lists them.

A residual that is kept, or comes back from the host, is not recomputed, nor is what
only it needs. Two arrays have no name: the softmax inside of attention, and the
residual stream between the two halves, which takes attention's output, summed over
`tensor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

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


# Kernels of one forward of a block (24 in Megatron-LM's layer): four matmuls with
# weights; of attention two matmuls, softmax, dropout and a transposition; the rest.
_ATTENTION_KERNELS, _ELEMENTWISE_KERNELS = 5, 15


class Again(NamedTuple):
    """Times that one backward of a block repeats each part of its forward.

    Args:
        qkv, out, up, down: The matmuls with weights, in order.
        attention: Scores to mixed values, with the traffic over `context`.
        elementwise: Norms, positions, activation.
        sums: Sums of the residual stream over `tensor`.
        gathers: Gathers of its sequence before a matmul.
        exchanges: Tokens to their experts and back.
    """

    qkv: int = 0
    attention: int = 0
    out: int = 0
    up: int = 0
    down: int = 0
    elementwise: int = 0
    sums: int = 0
    gathers: int = 0
    exchanges: int = 0

    @property
    def kernels(self) -> int:
        """Number of kernels launched for them."""
        matmuls = self.qkv + self.out + self.up + self.down
        attention = _ATTENTION_KERNELS * self.attention
        return matmuls + attention + _ELEMENTWISE_KERNELS * self.elementwise


_WHOLE = Again(*(1,) * 5, elementwise=1, sums=2, gathers=2, exchanges=1)


def recomputation(run: Run, *, moe: bool) -> Again:
    """Return what the layout's remat repeats, as counted in compiled programs."""
    remat, eager = run.layout.remat, run.execution.eager
    if remat == "none":
        return Again()
    if remat == "stage":
        # In a loop over the stage's blocks, which reads the output of each.
        return _WHOLE
    if remat == "full":
        return _WHOLE if eager else _named(run, (), moe)
    if remat == "stage_full":
        last = _WHOLE if eager else _named(run, (), moe)
        return Again(*map(sum, zip(_WHOLE, last, strict=True)))
    if remat == "selective" and eager:
        return Again(attention=0 if run.fused_attention else 1)
    return _named(run, kept_names(run), moe)


def kept_names(run: Run) -> tuple[str, ...]:
    """Return the names of the residuals that are kept besides the block's input."""
    names = run.layout.residual_names
    if names is not None:
        return names.every
    if run.layout.remat == "dots":
        return OF_MATMULS
    return (*NAMED, *OF_EXPERTS) if run.layout.remat == "selective" else ()


NAMED = (
    "attention_normed",
    "attention_qkv",
    "attention_mixed",
    "attention_out",
    "mlp_normed",
    "mlp_gate_up",
    "mlp_up",
    "mlp_hidden",
)
"""Residuals that blocks name with `Scope.save`; gated blocks have no `mlp_up`, others
no `mlp_gate_up`."""

OF_EXPERTS = ("experts_in", "experts_gate_up")
"""Residuals of routed experts: rows that a device received, and their first matmul.

They are made in a loop over tiles, none of whose matmuls `dots` keeps.
"""


def _named(run: Run, kept: tuple[str, ...], moe: bool) -> Again:
    """Recomputation if the residuals of these names are kept.

    No gradient needs the MLP's output, but a router's and that of a gate on it. The
    sequence is gathered for the weights' gradients anyway, which serves here too: equal
    collectives merge.
    """
    qkv, out = int("attention_qkv" not in kept), int("attention_out" not in kept)
    tiled = moe and not run.execution.eager
    wide = {"experts_gate_up"} if tiled else {"mlp_up", "mlp_gate_up"}
    up = int(not wide & set(kept))
    gated = int(run.workload.modulations > 0)
    return Again(
        qkv=qkv,
        attention=1,
        out=out,
        up=up,
        down=gated or int(moe) * up,
        elementwise=1,
        sums=out + gated,
        exchanges=int("experts_in" not in kept) if tiled else int(moe) * up,
    )
