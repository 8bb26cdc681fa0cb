"""Rows of the attention that Llama, Qwen, Mixtral and Gemma share."""

from __future__ import annotations

from meshpar.models.convert.row import Row

# K kv heads, G queries for each, H head_dim, D embed. A group of ours holds its
# queries, its key and its value.


def attention(theirs: str, ours: str, *, bias: bool, norm: bool) -> tuple[Row, ...]:
    """Grouped queries, keys and values as three matrices of theirs.

    Args:
        theirs: What their names begin with.
        ours: What our paths begin with.
        bias: Whether queries, keys and values have biases.
        norm: Whether queries and keys are normalised.
    """
    rows = (
        Row(
            f"{theirs}.q_proj.weight", f"{ours}.qkv[:, :, :-2]", "(K G H) D -> D K G H"
        ),
        Row(f"{theirs}.k_proj.weight", f"{ours}.qkv[:, :, -2]", "(K H) D -> D K H"),
        Row(f"{theirs}.v_proj.weight", f"{ours}.qkv[:, :, -1]", "(K H) D -> D K H"),
        Row(f"{theirs}.o_proj.weight", f"{ours}.out", "D (N H) -> N H D"),
    )
    if bias:
        rows += (
            Row(f"{theirs}.q_proj.bias", f"{ours}.bias[:, :-2]", "(K G H) -> K G H"),
            Row(f"{theirs}.k_proj.bias", f"{ours}.bias[:, -2]", "(K H) -> K H"),
            Row(f"{theirs}.v_proj.bias", f"{ours}.bias[:, -1]", "(K H) -> K H"),
        )
    if norm:
        rows += (
            Row(f"{theirs}.q_norm.weight", f"{ours}.q_norm.scale"),
            Row(f"{theirs}.k_norm.weight", f"{ours}.k_norm.scale"),
        )
    return rows
