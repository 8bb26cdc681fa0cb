"""The workload of a model's released `config.json` (Hugging Face Transformers)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshpar.errors import InputError
from meshpar.foreign_files import read_json
from meshpar.planner.workload.config_json import with_defaults
from meshpar.planner.workload.workload import Workload

GPT2: dict[str, Any] = {
    "tied": True,
    "learned_positions": True,
    "layer_norm": True,
    "biases": True,
}
"""What a GPT-2 has and a `Workload` does not have by default."""

LLAMA: dict[str, Any] = {"gated": True}
"""The same of a Llama."""


def workload_from_json(path: str | Path) -> Workload:
    """The workload of a model's released `config.json`.

    Raises:
        InputError: It is no JSON object, its `model_type` is not known here, or a size
            is missing.
    """
    values = read_json(path, key="weights.unreadable_json")
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise InputError(
            f"{str(path)!r} has model_type {kind!r}; known: "
            f"{', '.join(sorted(_FAMILIES))}",
            key="weights.unknown_model_type",
        )
    _refuse_unplanned(path, values)
    try:
        return Workload(name=str(path), **_FAMILIES[kind](with_defaults(values, kind)))
    except KeyError as error:
        raise InputError(
            f"{str(path)!r} does not give {error}", key="weights.missing_config_value"
        ) from error
    except InputError as error:
        raise InputError(f"{str(path)!r}: {error}", key=error.key) from error


# Keys that would change a block's parameters, which nothing here counts.
_UNPLANNED = ("attention_bias", "mlp_bias", "mlp_only_layers")


def _refuse_unplanned(path: str | Path, values: dict[str, Any]) -> None:
    for key in _UNPLANNED:
        if values.get(key):
            raise InputError(
                f"{str(path)!r}: {key}={values[key]!r} is not planned for; write sizes "
                "such as layers=4,hidden=256,biases=true instead",
                key="weights.unplanned_key",
            )
    if values.get("decoder_sparse_step", 1) != 1:
        raise InputError(
            f"{str(path)!r}: decoder_sparse_step={values['decoder_sparse_step']!r} is "
            "not planned for; every layer has experts where it is 1",
            key="weights.unplanned_key",
        )


def _hf_gpt2(values: dict[str, Any]) -> dict[str, Any]:
    return {
        **GPT2,
        "layers": values["n_layer"],
        "hidden": values["n_embd"],
        "heads": values["n_head"],
        "vocab": values["vocab_size"],
        "ffn": values["n_inner"] or 0,
        "seq": values["n_positions"],
    }


def _hf_llama(values: dict[str, Any]) -> dict[str, Any]:
    return {**_hf_decoder(values), "ffn": values["intermediate_size"]}


def _hf_decoder(values: dict[str, Any]) -> dict[str, Any]:
    heads = values["num_attention_heads"]
    return {
        **LLAMA,
        "layers": values["num_hidden_layers"],
        "hidden": values["hidden_size"],
        "heads": heads,
        "kv_heads": values["num_key_value_heads"] or heads,
        "head_dim": values.get("head_dim") or 0,
        "vocab": values["vocab_size"],
        "seq": values.get("max_position_embeddings") or 2048,
        "tied": bool(values.get("tie_word_embeddings")),
    }


def _hf_qwen2(values: dict[str, Any]) -> dict[str, Any]:
    return {**_hf_llama(values), "qkv_bias": True}


def _hf_qwen3(values: dict[str, Any]) -> dict[str, Any]:
    return {**_hf_llama(values), "qk_norm": True}


def _hf_mixtral(values: dict[str, Any]) -> dict[str, Any]:
    return {
        **_hf_llama(values),
        "experts": values["num_local_experts"],
        "top_k": values["num_experts_per_tok"],
    }


def _hf_qwen3_moe(values: dict[str, Any]) -> dict[str, Any]:
    return {
        **_hf_decoder(values),
        # Of layers without experts, which it has none of.
        "ffn": values.get("intermediate_size") or 0,
        "qk_norm": True,
        "experts": values["num_experts"],
        "top_k": values["num_experts_per_tok"],
        "expert_ffn": values["moe_intermediate_size"],
    }


def _hf_deepseek(values: dict[str, Any]) -> dict[str, Any]:
    return {
        **{**_hf_llama(values), "head_dim": 0},
        "experts": values["n_routed_experts"],
        "top_k": values["num_experts_per_tok"],
        "expert_ffn": values["moe_intermediate_size"],
        "shared_experts": values["n_shared_experts"],
        "dense_layers": values["first_k_dense_replace"],
        "q_lora_rank": values["q_lora_rank"] or 0,
        **{name: values[name] for name in _DEEPSEEK_HEADS},
    }


_DEEPSEEK_HEADS = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
_FAMILIES = {
    "gpt2": _hf_gpt2,
    "llama": _hf_llama,
    "mistral": _hf_llama,
    "qwen2": _hf_qwen2,
    "qwen3": _hf_qwen3,
    "qwen3_moe": _hf_qwen3_moe,
    "mixtral": _hf_mixtral,
    "deepseek_v3": _hf_deepseek,
}
