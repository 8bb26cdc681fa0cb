"""A Hugging Face `config.json` as one of our configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshpar import InputError
from models.gpt2 import GPT2Config
from models.layers.rope import RopeScaling
from models.llama import LlamaConfig


def config_from_json(path: str | Path) -> LlamaConfig | GPT2Config:
    """The config of a model's released `config.json`.

    Raises:
        InputError: It is no JSON object, its `model_type` is not known here, or a
            size is missing (null is missing too) or not a whole number.
    """
    try:
        values = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"cannot read {str(path)!r} as JSON: {error}") from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind not in ("llama", "qwen2", "qwen3", "gpt2"):
        raise InputError(
            f"{str(path)!r} has model_type {kind!r}; known: gpt2, llama, qwen2, qwen3"
        )
    given = _without_nulls(values)
    try:
        return _gpt2(given) if kind == "gpt2" else _llama(given, kind)
    except KeyError as error:
        raise InputError(f"{str(path)!r} does not give {error}") from error
    except InputError as error:
        raise InputError(f"{str(path)!r}: {error}") from error


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


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
    return LlamaConfig(
        layers=values["num_hidden_layers"],
        embed=values["hidden_size"],
        heads=heads,
        kv_heads=values.get("num_key_value_heads", heads),
        ffn=values["intermediate_size"],
        vocab=values["vocab_size"],
        head_dim=values.get("head_dim", 0),
        tied=values.get("tie_word_embeddings", False),
        rope_theta=rope.get("rope_theta", values.get("rope_theta", 10_000.0)),
        rope_scaling=_rope_scaling(rope),
        qkv_bias=kind == "qwen2" or values.get("attention_bias", False),
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
                '{"rope_type": "llama3", "factor": 8.0, ...}, or null'
            )
    return _without_nulls(
        values.get("rope_scaling") or values.get("rope_parameters") or {}
    )


def _rope_scaling(values: dict[str, Any]) -> RopeScaling | None:
    kind = values.get("rope_type", values.get("type"))
    if kind == "default" or (kind is None and "factor" not in values):
        return None
    if kind != "llama3":
        raise InputError(
            f"rope_scaling of type {kind!r} is not known here; known: llama3"
        )
    return RopeScaling(
        factor=values["factor"],
        low_factor=values["low_freq_factor"],
        high_factor=values["high_freq_factor"],
        original_seq=values["original_max_position_embeddings"],
    )
