"""Gemma 3, text alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshpar import InputError
from meshpar.models.convert.row import Row
from meshpar.models.convert.tables.attention import attention
from meshpar.models.gemma3 import Gemma3Config

COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "architectures": ("Gemma3ForCausalLM",),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False,),
    "tie_word_embeddings": (True,),
    "quantization_config": (None,),
}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def table(config: Gemma3Config) -> tuple[Row, ...]:
    """Their names, our paths; a block of ours is a period of layers."""
    whole = config.layers - config.left_over
    return (
        Row("model.embed_tokens.weight", "token_embed"),
        Row("model.norm.weight", "final_norm.scale"),
        *(
            row
            for at in range(config.period)
            for row in _layer(f"blocks.layer{at}", at, config.period)
        ),
        *(
            row
            for at in range(config.left_over)
            for row in _layer(f"last_blocks.layer{at}", whole + at, 1)
        ),
    )


def _layer(ours: str, first: int, stride: int) -> Iterator[Row]:
    layer = "model.layers.{layer}"
    rows = (
        Row(f"{layer}.input_layernorm.weight", f"{ours}.attention_norm.scale"),
        *attention(f"{layer}.self_attn", f"{ours}.attention", bias=False, norm=True),
        Row(
            f"{layer}.post_attention_layernorm.weight",
            f"{ours}.attention_out_norm.scale",
        ),
        Row(f"{layer}.pre_feedforward_layernorm.weight", f"{ours}.mlp_norm.scale"),
        Row(f"{layer}.mlp.gate_proj.weight", f"{ours}.mlp.gate_up[:, 0]", "F D -> D F"),
        Row(f"{layer}.mlp.up_proj.weight", f"{ours}.mlp.gate_up[:, 1]", "F D -> D F"),
        Row(f"{layer}.mlp.down_proj.weight", f"{ours}.mlp.down", "D F -> F D"),
        Row(f"{layer}.post_feedforward_layernorm.weight", f"{ours}.mlp_out_norm.scale"),
    )
    return (row.numbered(first, stride) for row in rows)


def from_json(values: Mapping[str, Any]) -> Gemma3Config:
    """Our config of theirs.

    Raises:
        InputError: Its layers do not repeat, or its positions are scaled in a way that
            ours are not.
    """
    layers = values["num_hidden_layers"]
    ropes = values.get("rope_parameters") or {}
    far, near = ropes.get(_GLOBAL, {}), ropes.get(_LOCAL, {})
    far = {**far, **(values.get("rope_scaling") or {})}
    kind = far.get("rope_type", "default")
    if kind not in ("default", "linear") or near.get("rope_type", "default") != (
        "default"
    ):
        raise InputError(
            f"rope_type={kind!r} is not known here; known: default, linear where all "
            "tokens are seen, default elsewhere",
            key="weights.unknown_rope_scaling",
        )
    size = values.get("head_dim", 256)
    query_size = values.get("query_pre_attn_scalar", 256)
    return Gemma3Config(
        layers=layers,
        embed=values["hidden_size"],
        heads=values["num_attention_heads"],
        kv_heads=values.get("num_key_value_heads", values["num_attention_heads"]),
        head_dim=size,
        ffn=values["intermediate_size"],
        vocab=values["vocab_size"],
        period=_period(values, layers),
        window=values.get("sliding_window", 4096),
        query_size=0 if query_size == size else query_size,
        rope_theta=far.get("rope_theta", values.get("rope_theta", 1_000_000.0)),
        rope_factor=far.get("factor", 1.0),
        local_rope_theta=near.get(
            "rope_theta", values.get("rope_local_base_freq", 10_000.0)
        ),
        norm_epsilon=values.get("rms_norm_eps", 1e-6),
    )


def _period(values: Mapping[str, Any], layers: int) -> int:
    """Layers from one that sees all tokens to the next.

    Raises:
        InputError: They are not those of a period.
    """
    pattern = values.get("sliding_window_pattern", 6)
    types = values.get("layer_types")
    if types is None:
        return whole_period(pattern, layers)
    period = types.index(_GLOBAL) + 1 if _GLOBAL in types else 0
    if not period or types != _types(layers, period):
        raise InputError(
            f"layer_types={types!r}: one layer in so many must see all tokens, always "
            "after as many that see a window; take another model",
            key="weights.irregular_layer_types",
        )
    return period


def whole_period(pattern: int, layers: int) -> int:
    """The period of so many layers.

    Raises:
        InputError: They are less than one: theirs would all see a window.
    """
    if layers < pattern:
        raise InputError(
            f"{layers} layers, of which only each {pattern}th sees all tokens: all of "
            "them see a window, and ours has no such model; take one of at least "
            f"{pattern} layers",
            key="weights.all_layers_windowed",
        )
    return pattern


def _types(layers: int, period: int) -> list[str]:
    return [_GLOBAL if (at + 1) % period == 0 else _LOCAL for at in range(layers)]


def to_json(config: Gemma3Config) -> dict[str, Any]:
    """A `config.json` of the model."""
    far: dict[str, Any] = {"rope_type": "default"}
    if config.rope_factor != 1:
        far = {"rope_type": "linear", "factor": config.rope_factor}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": config.layers,
        "hidden_size": config.embed,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocab,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": _types(config.layers, config.period),
        "sliding_window": config.window,
        "sliding_window_pattern": config.period,
        "query_pre_attn_scalar": config.query_size or config.head_dim,
        "max_position_embeddings": config.max_seq or 32_768,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rms_norm_eps": config.norm_epsilon,
        # Both spellings: `rope_parameters` is read by Transformers 5, the others by 4.
        "rope_theta": float(config.rope_theta),
        "rope_local_base_freq": float(config.local_rope_theta),
        "rope_scaling": far if config.rope_factor != 1 else None,
        "rope_parameters": {
            _GLOBAL: {**far, "rope_theta": float(config.rope_theta)},
            _LOCAL: {
                "rope_type": "default",
                "rope_theta": float(config.local_rope_theta),
            },
        },
        "initializer_range": config.init_std,
    }
