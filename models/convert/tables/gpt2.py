"""GPT-2, whose matrices lie as ours do: input first (`Conv1D`)."""

from __future__ import annotations

from typing import Any

from meshpar.models.convert.row import Row
from meshpar.models.gpt2 import GPT2Config

_H = "transformer.h.{layer}"
PREFIX = "transformer."
"""Prefix that the tensor names of some files leave out."""

# P query, key and value, N heads, H head_dim, D embed.
TABLE = (
    Row("transformer.wte.weight", "token_embed"),
    Row("transformer.wpe.weight", "position_embed"),
    Row("transformer.ln_f.weight", "final_norm.scale"),
    Row("transformer.ln_f.bias", "final_norm.bias"),
    Row(f"{_H}.ln_1.weight", "blocks.attention_norm.scale"),
    Row(f"{_H}.ln_1.bias", "blocks.attention_norm.bias"),
    Row(f"{_H}.attn.c_attn.weight", "blocks.attention.qkv", "D (P N H) -> D N P H"),
    Row(f"{_H}.attn.c_attn.bias", "blocks.attention.bias", "(P N H) -> N P H"),
    Row(f"{_H}.attn.c_proj.weight", "blocks.attention.out", "(N H) D -> N H D"),
    Row(f"{_H}.attn.c_proj.bias", "blocks.attention.out_bias"),
    Row(f"{_H}.ln_2.weight", "blocks.mlp_norm.scale"),
    Row(f"{_H}.ln_2.bias", "blocks.mlp_norm.bias"),
    Row(f"{_H}.mlp.c_fc.weight", "blocks.mlp.up"),
    Row(f"{_H}.mlp.c_fc.bias", "blocks.mlp.up_bias"),
    Row(f"{_H}.mlp.c_proj.weight", "blocks.mlp.down"),
    Row(f"{_H}.mlp.c_proj.bias", "blocks.mlp.down_bias"),
)


def table(config: GPT2Config) -> tuple[Row, ...]:
    """Their names, our paths."""
    return TABLE


def to_json(config: GPT2Config) -> dict[str, Any]:
    """A `config.json` of the model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": config.layers,
        "n_embd": config.embed,
        "n_head": config.heads,
        "n_inner": config.ffn or None,
        "n_positions": config.max_seq,
        "vocab_size": config.vocab,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_epsilon,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": config.init_std,
    }
