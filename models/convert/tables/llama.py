"""Llama 2 and 3, SmolLM2, Qwen2 and Qwen3."""

from __future__ import annotations

from typing import Any

from meshpar import InputError
from meshpar.models.convert.row import Row
from meshpar.models.convert.tables.attention import attention
from meshpar.models.llama import LlamaConfig

LAYER = "model.layers.{layer}"
NORMS = (
    Row(f"{LAYER}.input_layernorm.weight", "blocks.attention_norm.scale"),
    Row(f"{LAYER}.post_attention_layernorm.weight", "blocks.mlp_norm.scale"),
)
GATED_MLP = (
    Row(f"{LAYER}.mlp.gate_proj.weight", "blocks.mlp.gate_up[:, 0]", "F D -> D F"),
    Row(f"{LAYER}.mlp.up_proj.weight", "blocks.mlp.gate_up[:, 1]", "F D -> D F"),
    Row(f"{LAYER}.mlp.down_proj.weight", "blocks.mlp.down", "D F -> F D"),
)


def ends(*, tied: bool) -> tuple[Row, ...]:
    """Embedding, last norm and head."""
    rows = (
        Row("model.embed_tokens.weight", "token_embed"),
        Row("model.norm.weight", "final_norm.scale"),
    )
    return rows if tied else (*rows, Row("lm_head.weight", "unembed"))


def table(config: LlamaConfig) -> tuple[Row, ...]:
    """Their names, our paths."""
    return (
        *ends(tied=config.tied),
        *NORMS,
        *attention(
            f"{LAYER}.self_attn",
            "blocks.attention",
            bias=config.qkv_bias,
            norm=config.qk_norm,
        ),
        *GATED_MLP,
    )


def to_json(config: LlamaConfig) -> dict[str, Any]:
    """A `config.json` of the model.

    Raises:
        InputError: No model of theirs has those options together.
    """
    kind, architecture = _kind(config)
    return {
        "architectures": [architecture],
        "model_type": kind,
        **decoder_sizes(config),
        "intermediate_size": config.ffn,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
    }


def decoder_sizes(config: Any) -> dict[str, Any]:
    """Return the sizes in the `config.json` of a decoder with rotary positions."""
    scaling = config.rope_scaling
    rope = {"rope_type": "default"} if scaling is None else scaling.to_json()
    theta = float(config.rope_theta)
    head_dim = {"head_dim": config.size_per_head}
    return {
        "num_hidden_layers": config.layers,
        "hidden_size": config.embed,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        # Qwen3 takes 128 where a config is silent, the others embed / heads.
        **(head_dim if config.head_dim or config.qk_norm else {}),
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_seq or _positions(scaling),
        "tie_word_embeddings": config.tied,
        "rms_norm_eps": config.norm_epsilon,
        # Both spellings: `rope_parameters` is read by Transformers 5, the others by 4.
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": theta},
        "initializer_range": config.init_std,
    }


def _positions(scaling: Any) -> int:
    """Return the longest sequence for their config; our model has no limit."""
    return 8192 if scaling is None else int(scaling.factor * scaling.original_seq)


def _kind(config: LlamaConfig) -> tuple[str, str]:
    if config.window:
        raise InputError(
            f"window={config.window}: none of llama, qwen2 and qwen3 has a window in "
            "all layers; export a model without",
            key="weights.window_in_all_layers",
        )
    if config.qkv_bias and config.qk_norm:
        raise InputError(
            "qkv_bias=True and qk_norm=True: qwen2 has the one and qwen3 the other; "
            "export a model with one of them",
            key="weights.qkv_bias_with_qk_norm",
        )
    if config.qk_norm:
        return "qwen3", "Qwen3ForCausalLM"
    if config.qkv_bias:
        return "qwen2", "Qwen2ForCausalLM"
    return "llama", "LlamaForCausalLM"
