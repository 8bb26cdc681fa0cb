"""A Hugging Face `config.json` as one of our configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.gpt2 import GPT2Config
from models.layers.rope import RopeScaling
from models.llama import LlamaConfig


def config_from_json(path: str | Path) -> LlamaConfig | GPT2Config:
    """The config of a model's released `config.json`.

    Raises:
        ValueError: It is no JSON object, its `model_type` is not known here, or a
            size is missing.
    """
    try:
        values = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {str(path)!r} as JSON: {error}") from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind not in ("llama", "qwen2", "qwen3", "gpt2"):
        raise ValueError(
            f"{str(path)!r} has model_type {kind!r}; known: gpt2, llama, qwen2, qwen3"
        )
    try:
        return _gpt2(values) if kind == "gpt2" else _llama(values, kind)
    except KeyError as error:
        raise ValueError(f"{str(path)!r} does not give {error}") from error


def _gpt2(values: dict[str, Any]) -> GPT2Config:
    return GPT2Config(
        layers=values["n_layer"],
        embed=values["n_embd"],
        heads=values["n_head"],
        vocab=values["vocab_size"],
        ffn=values.get("n_inner") or 0,
        max_seq=values["n_positions"],
        norm_epsilon=values.get("layer_norm_epsilon", 1e-5),
    )


def _llama(values: dict[str, Any], kind: str) -> LlamaConfig:
    heads = values["num_attention_heads"]
    return LlamaConfig(
        layers=values["num_hidden_layers"],
        embed=values["hidden_size"],
        heads=heads,
        kv_heads=values.get("num_key_value_heads", heads),
        ffn=values["intermediate_size"],
        vocab=values["vocab_size"],
        head_dim=values.get("head_dim") or 0,
        tied=values.get("tie_word_embeddings", False),
        rope_theta=float(values.get("rope_theta", 10_000.0)),
        rope_scaling=_rope_scaling(values.get("rope_scaling")),
        qkv_bias=kind == "qwen2" or values.get("attention_bias", False),
        qk_norm=kind == "qwen3",
        norm_epsilon=values.get("rms_norm_eps", 1e-6),
    )


def _rope_scaling(values: dict[str, Any] | None) -> RopeScaling | None:
    if values is None:
        return None
    kind = values.get("rope_type", values.get("type"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(
            f"rope_scaling of type {kind!r} is not known here; known: llama3"
        )
    return RopeScaling(
        factor=values["factor"],
        low_factor=values["low_freq_factor"],
        high_factor=values["high_freq_factor"],
        original_seq=values["original_max_position_embeddings"],
    )
