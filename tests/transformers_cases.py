"""Tiny models of every family that `models/convert` knows, as Transformers has them.

Their weights are a function of each tensor's name, so that a file of names, shapes and
logits is all that a comparison needs.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax

from meshpar import Layout, make_train_step
from meshpar.rules.presets import default_rules

STORED = Path(__file__).parent / "data" / "transformers_logits.json"
"""Family -> config, shapes and logits; `tests/make_transformers_logits.py` made it."""

VOCAB = 32
TOKENS = np.random.default_rng(7).integers(0, VOCAB, (2, 8)).astype(np.int32)
IMAGES = np.random.default_rng(7).normal(size=(2, 8, 8, 3)).astype(np.float32)

_SIZES = {"hidden_size": 16, "vocab_size": VOCAB, "max_position_embeddings": 64}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_DENSE = {**_SIZES, **_HEADS, "num_hidden_layers": 2, "intermediate_size": 24}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}

CONFIGS = {
    "llama": {"model_type": "llama", **_DENSE, "rope_parameters": _LLAMA3},
    "smollm2": {"model_type": "llama", **_DENSE, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **_DENSE, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_DENSE, "head_dim": 8},
    "mixtral": {
        "model_type": "mixtral",
        **_DENSE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_DENSE,
        "head_dim": 8,
        "moe_intermediate_size": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_DENSE,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "moe_intermediate_size": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "rope_parameters": _YARN,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_DENSE,
        "head_dim": 8,
        "num_hidden_layers": 5,
        "sliding_window": 4,
        "layer_types": [
            *("sliding_attention", "full_attention") * 2,
            "sliding_attention",
        ],
        "query_pre_attn_scalar": 16,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 16,
        "n_head": 4,
        "vocab_size": VOCAB,
        "n_positions": 16,
    },
    "t5": {
        "model_type": "t5",
        "num_layers": 2,
        "num_decoder_layers": 2,
        "d_model": 16,
        "d_kv": 4,
        "num_heads": 4,
        "d_ff": 24,
        "vocab_size": VOCAB,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 6,
    },
    "vit": {
        "model_type": "vit",
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "image_size": 8,
        "patch_size": 4,
        "id2label": {str(label): f"LABEL_{label}" for label in range(6)},
    },
}
"""What a `config.json` of each says."""


def values_of(family: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor's fp32 values: normal, of deviation 0.3, norms' around 1.

    Those of Gemma 3 are around 0: they are what a scale is more than 1.
    """
    seed = zlib.crc32(name.encode())
    values = 0.3 * np.random.default_rng(seed).normal(size=shape)
    is_norm = family != "gemma3" and ("norm" in name or ".ln_" in name)
    return (values + (is_norm and name.endswith("weight"))).astype(np.float32)


def stored(family: str) -> dict:
    """Config, shapes by name, and logits of one family."""
    return json.loads(STORED.read_text())[family]


def write_model(folder: Path, family: str) -> Path:
    """A folder as Transformers would write it, of the names and shapes it has."""
    from safetensors.numpy import save_file

    case = stored(family)
    shapes = case["shapes"].items()
    tensors = {name: values_of(family, name, shape) for name, shape in shapes}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(case["config"]))
    return folder


def inputs_of(family: str) -> dict[str, np.ndarray]:
    """What both models are given."""
    if family == "vit":
        return {"images": IMAGES}
    if family == "t5":
        return {"source_tokens": TOKENS[:, ::-1].copy(), "target_tokens": TOKENS}
    return {"tokens": TOKENS}


def logits_on(weights, layout, inputs):
    """Logits of read weights on a layout, with the step and the state behind them."""
    parsed = Layout.parse(layout)
    # The 9 heads of SmolLM2 do not divide over tensor=2: they are whole there.
    rules = replace(
        default_rules(parsed), replicate_if_indivisible={"heads", "kv_heads"}
    )
    devices = jax.devices()[: parsed.num_devices]
    step = make_train_step(
        weights.model, optax.sgd(0.1), parsed, devices=devices, rules=rules
    )
    state = step.init(params=weights.params, model_state=weights.model_state)
    return np.asarray(step.logits(state, inputs)), step, state
