"""Bytes of activations that a block keeps for its backward, on one device.

The count of Korthikanti et al. 2022 (section 4.1 and Table 2) for s tokens of b
sequences, h = embed, a heads, t = tensor, in 16 bits: sbh (34 + 5 as/h) without
anything, of which dropout masks are 2 sbh and those of the scores as^2 b, and their
dropped copy 2 as^2 b. Our blocks drop no scores, and keep a mask for each branch only
where the model drops anything. So a GELU block with ffn = 4h keeps

    remat      one device          tensor t                     and sequence parallel
    none       sbh (32 + 2 as/h)   sbh (8 + 24/t + 2 as/(ht))   sbh/t (32 + 2 as/h)
    selective  sbh 32              sbh (8 + 24/t)               sbh 32/t
    full       sbh 2               sbh 2                        sbh 2/t

and 2 sbh more with dropout and `none`; other sizes as `block_activations` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshpar.residual_names import BLOCK_INPUT, ResidualNames, is_named

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
        gated: Whether the MLP has a gate beside `up` (SwiGLU).
        dropout: Whether both branches drop values.
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
        name: As `remat=save:NAME` calls it, where it has a name there.
        bytes_per_token: Of one token, on one device alone.
        along: What splits it: `tensor`, or `residual` for the tensor axis under
            sequence parallelism only.
    """

    name: str
    bytes_per_token: float
    along: str


def block_activations(
    block: BlockShape, seq: int, *, value_bytes: int = 2, fused_attention: bool = False
) -> tuple[Residual, ...]:
    """All that a block keeps without remat, in the order in which it is made.

    Args:
        block: The block; norms on queries and keys are not counted.
        seq: Tokens of a sequence.
        value_bytes: Of a value of the compute dtype.
        fused_attention: Whether a fused kernel keeps the fp32 log of each softmax's sum
            instead of the softmax (Dao et al. 2022, section 3.1).
    """
    heads = block.heads * block.head_dim
    qkv = heads + 2 * block.kv_heads * block.head_dim
    up = (2 if block.gated else 1) * block.ffn
    scores = block.heads * (_FP32_BYTES if fused_attention else seq * value_bytes)

    def of(name: str, values: int, along: str) -> Residual:
        return Residual(name=name, bytes_per_token=values * value_bytes, along=along)

    masks = 2 * _MASK_BYTES * block.embed if block.dropout else 0
    return (
        of("x", block.embed, "residual"),
        of("attention_normed", block.embed, "residual"),
        of("attention_qkv", qkv, "tensor"),
        Residual(name="scores", bytes_per_token=scores, along="tensor"),
        of("attention_mixed", heads, "tensor"),
        of("attention_out", block.embed, "residual"),
        of("mlp_normed", block.embed, "residual"),
        of("mlp_gate_up" if block.gated else "mlp_up", up, "tensor"),
        of("mlp_hidden", block.ffn, "tensor"),
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
    """Bytes that one block keeps of `batch` sequences on each of `tensor` devices.

    Args:
        block: The block.
        batch: Sequences, of one microbatch on one device.
        seq: Tokens of a sequence.
        remat: `Layout.remat`; residuals that it offloads are not on the device.
        tensor: Devices that split the block's matmuls.
        sequence_parallel: Whether they split the residual stream too.
        value_bytes: Of a value of the compute dtype: 2 for bf16.
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
