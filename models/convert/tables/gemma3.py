"""Gemma 3, text alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshpar import InputError
from meshpar.errors import whole_number
from meshpar.models.convert.rope_json import Rope, rope_as, rope_object
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
    layers = whole_number("num_hidden_layers", values["num_hidden_layers"])
    far, near = _ropes(values)
    size, query_size = values["head_dim"], values["query_pre_attn_scalar"]
    return Gemma3Config(
        layers=layers,
        embed=values["hidden_size"],
        heads=values["num_attention_heads"],
        kv_heads=values["num_key_value_heads"],
        head_dim=size,
        ffn=values["intermediate_size"],
        vocab=values["vocab_size"],
        period=_period(values, layers),
        window=values["sliding_window"],
        query_size=0 if query_size == size else query_size,
        rope_theta=far.theta(values["rope_theta"]),
        rope_factor=1.0 if far.kind == "default" else far.values["factor"],
        local_rope_theta=near.theta(values["rope_local_base_freq"]),
        norm_epsilon=values["rms_norm_eps"],
    )


def _ropes(values: Mapping[str, Any]) -> tuple[Rope, Rope]:
    """Return the positions where all tokens are seen, and where a window is.

    `rope_scaling` is of the former alone, and is laid over what `rope_parameters` says.

    Raises:
        InputError: One is scaled in a way that ours are not.
    """
    both = rope_object(values, "rope_parameters")
    if both.keys() - {_LOCAL, _GLOBAL}:
        raise InputError(
            f"rope_parameters={both!r}: must have an object for each of {_LOCAL} and "
            f"{_GLOBAL}, and no more",
            key="weights.unknown_rope_scaling",
        )
    far, near = rope_object(both, _GLOBAL), rope_object(both, _LOCAL)
    laid_over = rope_object(values, "rope_scaling")
    kind = laid_over.get("rope_type")
    if kind is None and laid_over.get("type", "default") != "default":
        # Transformers 4 takes it for the type; 5 does not read it, and scales nothing.
        raise InputError(
            f"rope_scaling={laid_over!r}: Transformers 4 and 5 read that type "
            "differently; name it rope_type",
            key="weights.unknown_rope_scaling",
        )
    if kind is not None:
        far = {name: value for name, value in far.items() if name != "type"}
    ropes = (
        rope_as({**far, **laid_over}, ("default", "linear")),
        rope_as(near, ("default",)),
    )
    for rope in ropes:
        rotated = rope.values.get("partial_rotary_factor", 1.0)
        if rotated != 1.0:
            raise InputError(
                f"partial_rotary_factor={rotated!r} must be 1.0: models/gemma3.py "
                "rotates all dims of a head; take another config",
                key="weights.unsupported_config_value",
            )
    return ropes


def _period(values: Mapping[str, Any], layers: int) -> int:
    """Layers from one that sees all tokens to the next.

    Raises:
        InputError: They are not those of a period.
    """
    types = values["layer_types"]
    if types is None:
        pattern = values["sliding_window_pattern"]
        return whole_period(whole_number("sliding_window_pattern", pattern), layers)
    is_list = isinstance(types, list) and _GLOBAL in types
    period = types.index(_GLOBAL) + 1 if is_list else 0
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
            f"{layers} layers, but only every {pattern}th attends to all tokens: a "
            "model with windows in all layers is not supported; use at least "
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
