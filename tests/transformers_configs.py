"""`config.json` files of every family: each key left out, null and under each name.

`tests/make_transformers_defaults.py` lets Transformers read them and writes what it
makes of each; `tests/test_config_json.py` compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STORED = Path(__file__).parent / "data" / "transformers_defaults.json"
"""Family -> label of a case -> what Transformers makes of it, null if it refuses."""

ABSENT: Any = object()
_SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "num_attention_heads": 64,
    "intermediate_size": 96,
    "vocab_size": 32,
}
_DECODER = {
    **_SIZES,
    "num_key_value_heads": 16,
    "head_dim": 8,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "max_position_embeddings": 4096,
}
_FLAT = {"rope_theta": 5000.0}
_EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}

# Family -> a config that gives every key that is read, none of them at its default.
BASES: Mapping[str, dict[str, Any]] = {
    "llama": {**_DECODER, **_FLAT, "mlp_bias": False, "pretraining_tp": 1},
    "mistral": {**_DECODER, **_FLAT, "sliding_window": None},
    "qwen2": {**_DECODER, **_FLAT, "use_sliding_window": False, "layer_types": None},
    "qwen3": {**_DECODER, **_FLAT, "use_sliding_window": False, "layer_types": None},
    "mixtral": {
        **_DECODER,
        **_FLAT,
        **_EXPERTS,
        "num_local_experts": 4,
        "sliding_window": None,
    },
    "qwen3_moe": {
        **_DECODER,
        **_FLAT,
        **_EXPERTS,
        "num_experts": 16,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    },
    "deepseek_v3": {
        **_SIZES,
        **_FLAT,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "moe_intermediate_size": 12,
        "n_routed_experts": 16,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_interleave": True,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
    },
    "gemma3_text": {
        **_SIZES,
        "num_key_value_heads": 16,
        "head_dim": 8,
        "query_pre_attn_scalar": 16,
        "sliding_window": 12,
        "sliding_window_pattern": 3,
        "layer_types": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "rope_local_base_freq": 50.0,
        "max_position_embeddings": 4096,
    },
    "gpt2": {
        "n_layer": 2,
        "n_embd": 16,
        "n_head": 4,
        "n_inner": 24,
        "n_positions": 8,
        "vocab_size": 32,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-6,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    "t5": {
        "num_layers": 2,
        "num_decoder_layers": 3,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_heads": 4,
        "vocab_size": 32,
        "feed_forward_proj": "gated-gelu",
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 40,
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-5,
    },
    "vit": {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 1,
        "num_labels": 7,
        "hidden_act": "gelu_new",
        "qkv_bias": True,
        "layer_norm_eps": 1e-6,
    },
}

_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
_ROPES = (
    {"rope_type": "default"},
    {"type": "default"},
    {"rope_type": "default", "factor": 8.0},
    {"rope_type": "default", "type": "yarn", **_YARN},
    {"rope_theta": 300.0},
    {"factor": 8.0},
    *(
        {name: kind, **more}
        for name in ("rope_type", "type")
        for kind, more in (
            ("linear", {"factor": 2.0}),
            ("linear", {"factor": 2.0, "rope_theta": 300.0}),
            ("llama3", _LLAMA3),
            ("llama3", {**_LLAMA3, "rope_theta": 300.0}),
            ("yarn", _YARN),
            ("yarn", {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8}),
            ("yarn", {**_YARN, "beta_fast": 16, "beta_slow": 2}),
            ("yarn", {**_YARN, "beta_fast": None, "truncate": None}),
            ("yarn", {**_YARN, "attention_factor": 1.5}),
            ("dynamic", {"factor": 2.0}),
        )
    ),
)
_NESTED = (
    *({"full_attention": rope} for rope in _ROPES),
    {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
    {"sliding_attention": {"type": "linear", "factor": 2.0}},
    {"sliding_attention": {"rope_theta": 20.0}, "full_attention": None},
    {"rope_type": "linear", "factor": 2.0},
)

# Family -> names of one size, and what Transformers makes of both.
_SPELLINGS = {
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    "t5": {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "head_dim": "d_kv",
    },
}
_ALSO = {
    "t5": (
        {"feed_forward_proj": "relu"},
        {"num_hidden_layers": 2, "num_decoder_layers": ABSENT},
        {"num_hidden_layers": 2, "num_layers": ABSENT, "num_decoder_layers": ABSENT},
        {"scale_decoder_outputs": False},
        {"scale_decoder_outputs": True},
        {"tie_word_embeddings": True},
        {"dense_act_fn": "relu"},
        {"dense_act_fn": "gelu_new"},
        {"is_gated_act": False},
        {"is_gated_act": True},
    ),
    "vit": (
        {"id2label": {"0": "a", "1": "b", "2": "c"}},
        {"id2label": {"0": "a", "1": "b", "2": "c"}, "num_labels": ABSENT},
        {"id2label": {}, "num_labels": ABSENT},
        {"id2label": None, "num_labels": ABSENT},
    ),
    "gemma3_text": (
        {"layer_types": ["sliding_attention", "full_attention"] * 3},
        {"_sliding_window_pattern": 2},
    ),
}


@dataclass(frozen=True)
class ConfigCase:
    """A `config.json` of one family.

    Args:
        label: Its name among those of the family.
        base: A config of the family.
        changes: Keys that it has otherwise, or beside its own.
        left_out: Keys that it lacks.
    """

    label: str
    base: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()

    def values(self, kind: str) -> dict[str, Any]:
        """What the file says."""
        kept = {key: one for key, one in self.base.items() if key not in self.left_out}
        return {"model_type": kind, **kept, **self.changes}


def cases_of(kind: str) -> Iterator[ConfigCase]:
    """All of one family."""
    base = BASES[kind]
    yield ConfigCase("as it is", base)
    for key in base:
        yield ConfigCase(f"without {key}", base, {}, frozenset((key,)))
        yield ConfigCase(f"{key} null", base, {key: None})
    for key in ("num_key_value_heads", "head_dim", "q_lora_rank", "n_inner"):
        if key in base:
            yield ConfigCase(f"{key} 0", base, {key: 0})
    for other, key in _SPELLINGS.get(kind, {}).items():
        alone = {other: base[key]}
        yield ConfigCase(f"{other} alone", base, alone, frozenset((key,)))
        yield ConfigCase(f"{other} beside", base, alone)
        yield ConfigCase(f"{other} otherwise", base, {other: 2 * base[key]})
    for change in _ALSO.get(kind, ()):
        gone = frozenset(key for key, one in change.items() if one is ABSENT)
        said = {key: one for key, one in change.items() if key not in gone}
        yield ConfigCase(json.dumps([said, sorted(gone)]), base, said, gone)
    if "rope_theta" in base:
        yield from _rope_cases(kind, base)


def _rope_cases(kind: str, base: Mapping[str, Any]) -> Iterator[ConfigCase]:
    nested = _NESTED if kind == "gemma3_text" else _ROPES
    changes: list[dict[str, Any]] = [
        *({"rope_scaling": rope} for rope in _ROPES),
        *({"rope_parameters": rope} for rope in nested),
        {"rope_scaling": _ROPES[0], "rope_parameters": nested[4]},
        {"rope_scaling": {}, "rope_parameters": nested[4]},
        {"rope_scaling": None, "rope_parameters": None},
    ]
    for change in changes:
        yield ConfigCase(json.dumps(change), base, change)
        without = frozenset(("rope_theta",))
        yield ConfigCase(f"{json.dumps(change)}, no rope_theta", base, change, without)


_READ_BY_KIND = {
    "linear": ("factor",),
    "llama3": tuple(_LLAMA3),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "attention_factor"),
    ),
    "dynamic": ("factor",),
    "default": (),
}


def meaning(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a whole config says, without what no model of ours reads.

    A config of theirs as `to_dict` has it, or of ours as `json_of` has it.
    """
    found = {key: value for key, value in said.items() if key in _COMPARED}
    ropes = said.get("rope_parameters") or {}
    if "full_attention" in ropes:
        found["rope"] = {layer: _rope_meaning(one) for layer, one in ropes.items()}
    elif ropes:
        found["rope"] = _rope_meaning(ropes)
    if "image_size" in said:
        found["num_labels"] = len(said["id2label"])
    if "d_model" in said:
        # Whether there is a head of its own is in the file of weights, to theirs.
        found.pop("tie_word_embeddings", None)
        gated = said["feed_forward_proj"] == "gated-gelu"
        made = {"dense_act_fn": "gelu_new" if gated else "relu", "is_gated_act": gated}
        found |= {name: said.get(name, value) for name, value in made.items()}
    if "num_local_experts" in said:
        found["num_experts"] = said["num_local_experts"]
    if "decoder_sparse_step" in said:
        found.pop("intermediate_size", None)  # Of layers without experts: it has none.
    if not found.get("head_dim") and "hidden_size" in found:
        found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    if "n_embd" in found and found["n_inner"] is None:
        found["n_inner"] = 4 * found["n_embd"]
    return found


def _rope_meaning(rope: Any) -> Any:
    if not isinstance(rope, dict):
        return rope
    kind = rope["rope_type"]
    found = {name: rope.get(name) for name in _READ_BY_KIND[kind]}
    if kind == "yarn":
        found["beta_fast"] = found["beta_fast"] or 32
        found["beta_slow"] = found["beta_slow"] or 1
        found["truncate"] = bool(rope.get("truncate", True))
    return {"rope_type": kind, "rope_theta": rope["rope_theta"], **found}


_COMPARED = frozenset(
    key
    for base in BASES.values()
    for key in base
    if key
    not in {
        *("max_position_embeddings", "pretraining_tp", "rope_theta"),
        *("rope_local_base_freq", "sliding_window_pattern", "router_aux_loss_coef"),
        # Silent in what we write, or the layers' own.
        *("hidden_act", "use_sliding_window", "attention_bias", "mlp_bias"),
        *("num_experts", "num_labels"),
    }
) | {"router_aux_loss_coef", "scale_decoder_outputs"}
