"""A Hugging Face `config.json` as one of our configs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshpar import InputError
from meshpar.foreign_files import read_json
from meshpar.models.convert.rope_json import Rope, read_rope
from meshpar.models.convert.tables import deepseek, gemma3, moe, t5, vit
from meshpar.models.family import config_sizes
from meshpar.models.gpt2 import GPT2Config
from meshpar.models.llama import LlamaConfig
from meshpar.planner.workload.config_json import (
    NULL_IS_ABSENT,
    sizes_from_config,
    with_defaults,
)

_LLAMA_LIKE = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "layer_types": ("full_attention",),
}
_OF_ALL = {"partial_rotary_factor": (1.0,), "quantization_config": (None,)}

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
            missing or not a whole number, a key is null for which Transformers has no
            null, or it asks for something that our model would not compute, such as
            `mlp_bias`.
    """
    values = read_json(path, key="weights.unreadable_json")
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _COMPUTED:
        known = ", ".join(sorted(_COMPUTED))
        raise InputError(
            f"{str(path)!r} has model_type {kind!r}; known: {known}",
            key="weights.unknown_model_type",
        )
    try:
        if kind == "t5":
            t5.check_decoder_layers(values)
        given = with_defaults(values, kind)
        _check_computed(given, kind)
        return _config(given, kind)
    except KeyError as error:
        raise InputError(
            f"{str(path)!r} does not give {error}", key="weights.missing_config_value"
        ) from error
    except InputError as error:
        raise InputError(f"{str(path)!r}: {error}", key=error.key) from error


def _check_computed(values: Mapping[str, Any], kind: str) -> None:
    file = _FILES.get(kind, "models/llama.py")
    for name, computed in {**_OF_ALL, **_COMPUTED[kind]}.items():
        given = values.get(name, computed[0])
        if given is None and name in NULL_IS_ABSENT:
            given = computed[0]
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
    known = "yarn" if kind == "deepseek_v3" else "llama3"
    rope = read_rope(values, ("default", known))
    _check_computed(rope.values, kind)
    if kind == "deepseek_v3":
        return deepseek.from_json(values, rope)
    if kind in moe.COMPUTED:
        return moe.from_json(values, kind, rope)
    return _llama(values, kind, rope)


def _gpt2(values: Mapping[str, Any]) -> GPT2Config:
    sizes = config_sizes(sizes_from_config(values, "gpt2"))
    return GPT2Config(**sizes, norm_epsilon=values["layer_norm_epsilon"])


def _llama(values: Mapping[str, Any], kind: str, rope: Rope) -> LlamaConfig:
    return LlamaConfig(
        **config_sizes(sizes_from_config(values, kind)),
        rope_theta=rope.theta(values["rope_theta"]),
        rope_scaling=rope.scaling(),
        norm_epsilon=values["rms_norm_eps"],
    )
