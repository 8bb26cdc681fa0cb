"""A Hugging Face `config.json` as one of our configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshpar import InputError
from meshpar.foreign_files import read_json
from meshpar.models.convert.tables import deepseek, gemma3, moe, t5, vit
from meshpar.models.gpt2 import GPT2Config
from meshpar.models.layers.rope import RopeScaling
from meshpar.models.llama import LlamaConfig

_MOE_THETA = {"mixtral": 1_000_000.0, "qwen3_moe": 10_000.0}

_LLAMA_LIKE = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "layer_types": ("full_attention",),
    "quantization_config": (None,),
}

# Model type -> what a config may say, where it says it at all, for our model to compute
# the same: the first is what Transformers takes when a config is silent. Its
# `attention_bias` is on the output projection too, but Qwen2 reads no such key.
_COMPUTED = {
    "llama": {
        **_LLAMA_LIKE,
        "architectures": ("LlamaForCausalLM",),
        "attention_bias": (False,),
    },
    "qwen2": {
        **_LLAMA_LIKE,
        "architectures": ("Qwen2ForCausalLM",),
        "use_sliding_window": (False,),
    },
    "qwen3": {
        **_LLAMA_LIKE,
        "architectures": ("Qwen3ForCausalLM",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
    },
    "gpt2": {
        "architectures": ("GPT2LMHeadModel",),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
        "quantization_config": (None,),
    },
    **moe.COMPUTED,
    "deepseek_v3": deepseek.COMPUTED,
    "gemma3_text": gemma3.COMPUTED,
    "t5": t5.COMPUTED,
    "vit": vit.COMPUTED,
}
_FILES = {
    "gpt2": "models/gpt2.py",
    "mixtral": "models/moe.py",
    "qwen3_moe": "models/moe.py",
    "deepseek_v3": "models/moe.py",
    "gemma3_text": "models/gemma3.py",
    "t5": "models/encoder_decoder.py",
    "vit": "models/vit.py",
}


def config_from_json(path: str | Path) -> Any:
    """The config of a model's released `config.json`.

    Dropout is not read: it belongs to the training, not to the model.

    Raises:
        InputError: It is no JSON object, its `model_type` is not known here, a size is
            missing (null is missing too) or not a whole number, or it says something
            that our model would not compute, such as `mlp_bias`.
    """
    values = read_json(path, key="weights.unreadable_json")
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _COMPUTED:
        known = ", ".join(sorted(_COMPUTED))
        raise InputError(
            f"{str(path)!r} has model_type {kind!r}; known: {known}",
            key="weights.unknown_model_type",
        )
    given = _without_nulls(values)
    try:
        _check_computed(given, kind)
        return _config(given, kind)
    except KeyError as error:
        raise InputError(
            f"{str(path)!r} does not give {error}", key="weights.missing_config_value"
        ) from error
    except InputError as error:
        raise InputError(f"{str(path)!r}: {error}", key=error.key) from error


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _check_computed(values: dict[str, Any], kind: str) -> None:
    file = _FILES.get(kind, "models/llama.py")
    for name, computed in _COMPUTED[kind].items():
        given = values.get(name, computed[0])
        for value in given if isinstance(given, list) else [given]:
            if value not in computed and given not in computed:
                raise InputError(
                    f"{name}={value!r} is not what {file} computes, which is {name}="
                    f"{' or '.join(map(repr, computed))}; take another config, or "
                    "change a copy of that file",
                    key="weights.unsupported_config_value",
                )


def _config(values: dict[str, Any], kind: str) -> Any:
    if kind == "gpt2":
        return _gpt2(values)
    if kind == "gemma3_text":
        return gemma3.from_json(values)
    if kind == "t5":
        return t5.from_json(values)
    if kind == "vit":
        return vit.from_json(values)
    rope = _rope(values)
    if kind == "deepseek_v3":
        return deepseek.from_json(values, rope)
    if kind in moe.COMPUTED:
        theta = rope.get("rope_theta", values.get("rope_theta", _MOE_THETA[kind]))
        chosen = {"rope_theta": theta, "rope_scaling": _rope_scaling(rope)}
        return moe.from_json(values, kind, chosen)
    return _llama(values, kind)


def _gpt2(values: dict[str, Any]) -> GPT2Config:
    return GPT2Config(
        layers=values["n_layer"],
        embed=values["n_embd"],
        heads=values["n_head"],
        vocab=values["vocab_size"],
        ffn=values.get("n_inner", 0),
        max_seq=values["n_positions"],
        norm_epsilon=values.get("layer_norm_epsilon", 1e-5),
    )


def _llama(values: dict[str, Any], kind: str) -> LlamaConfig:
    heads = values["num_attention_heads"]
    rope = _rope(values)
    _check_computed(rope, kind)
    return LlamaConfig(
        layers=values["num_hidden_layers"],
        embed=values["hidden_size"],
        heads=heads,
        kv_heads=values.get("num_key_value_heads", heads),
        ffn=values["intermediate_size"],
        vocab=values["vocab_size"],
        head_dim=values.get("head_dim", 128 if kind == "qwen3" else 0),
        tied=values.get("tie_word_embeddings", False),
        rope_theta=rope.get("rope_theta", values.get("rope_theta", 10_000.0)),
        rope_scaling=_rope_scaling(rope),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        norm_epsilon=values.get("rms_norm_eps", 1e-6),
    )


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """What a config says of its rotary positions besides a `rope_theta` at the top.

    Configs written by Transformers 5 hold it as `rope_parameters`, which has
    `rope_theta` too; older ones as `rope_scaling`.
    """
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(values.get(name, {}), dict):
            raise InputError(
                f"{name}={values[name]!r}: must be an object, such as "
                '{"rope_type": "llama3", "factor": 8.0, ...}, or null',
                key="weights.rope_scaling_not_object",
            )
    return _without_nulls(
        values.get("rope_scaling") or values.get("rope_parameters") or {}
    )


def _rope_scaling(values: dict[str, Any]) -> RopeScaling | None:
    kind = values.get("rope_type", values.get("type"))
    if kind == "default" or not values.keys() - {"rope_theta", "partial_rotary_factor"}:
        return None
    if kind != "llama3":
        raise InputError(
            f"rope_scaling of type {kind!r} is not known here; known: llama3",
            key="weights.unknown_rope_scaling",
        )
    return RopeScaling(
        factor=values["factor"],
        low_factor=values["low_freq_factor"],
        high_factor=values["high_freq_factor"],
        original_seq=values["original_max_position_embeddings"],
    )
