"""Sizes of a Hugging Face `config.json`, with Transformers' defaults for absent keys.

The defaults are those of Transformers' config classes: `tests/test_config_json.py`
compares them with `tests/data/transformers_defaults.json`, which Transformers made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshpar.errors import InputError
from meshpar.foreign_files import read_json
from meshpar.planner.workload.workload import Workload

GPT2_FIELDS: Mapping[str, Any] = dict.fromkeys(
    ("tied", "learned_positions", "layer_norm", "biases"), True
)
"""Fields of a GPT-2's `Workload` that differ from the defaults."""

LLAMA_FIELDS: Mapping[str, Any] = {"gated": True}
"""The same of a Llama."""

REQUIRED: Any = object()
"""In place of a default: a size that a config has to give."""


@dataclass(frozen=True, kw_only=True)
class ConfigKeys:
    """The keys that are read of one family's `config.json`.

    Args:
        defaults: Key -> what Transformers takes if the config leaves it out, or
            `REQUIRED` where Transformers' default is the size of one certain model.
        nulls: Keys that may be null, which means None and not the default.
        spellings: Another name of a key -> the key.
    """

    defaults: Mapping[str, Any]
    nulls: frozenset[str] = frozenset()
    spellings: Mapping[str, str] = field(default_factory=dict)


_SIZES = dict.fromkeys(
    (
        *("num_hidden_layers", "hidden_size", "num_attention_heads"),
        *("intermediate_size", "vocab_size"),
    ),
    REQUIRED,
)
_DECODER = {
    **_SIZES,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
_HEADS = frozenset(("num_key_value_heads", "head_dim"))
_EXPERTS = {"num_experts_per_tok": REQUIRED, "router_aux_loss_coef": 0.001}

# For `num_key_value_heads` null is `num_attention_heads`, and so it is for a llama that
# leaves it out; the others take a number that does not follow their heads.
KEYS: Mapping[str, ConfigKeys] = {
    "llama": ConfigKeys(defaults=_DECODER, nulls=_HEADS),
    "mistral": ConfigKeys(
        defaults={**_DECODER, "num_key_value_heads": 8}, nulls=_HEADS
    ),
    "qwen2": ConfigKeys(defaults={**_DECODER, "num_key_value_heads": 32}, nulls=_HEADS),
    "qwen3": ConfigKeys(
        defaults={**_DECODER, "num_key_value_heads": 32, "head_dim": 128},
        nulls=frozenset(("num_key_value_heads",)),
    ),
    "mixtral": ConfigKeys(
        defaults={
            **_DECODER,
            **_EXPERTS,
            "num_key_value_heads": 8,
            "num_local_experts": REQUIRED,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
        },
        nulls=_HEADS,
        spellings={"num_experts": "num_local_experts"},
    ),
    "qwen3_moe": ConfigKeys(
        defaults={
            **{key: one for key, one in _DECODER.items() if key != "intermediate_size"},
            **_EXPERTS,
            "num_key_value_heads": 4,
            "num_experts": REQUIRED,
            "moe_intermediate_size": REQUIRED,
            "norm_topk_prob": False,
        },
        nulls=_HEADS,
        spellings={"num_local_experts": "num_experts"},
    ),
    "deepseek_v3": ConfigKeys(
        defaults={
            **_SIZES,
            **dict.fromkeys(
                (
                    *("num_experts_per_tok", "moe_intermediate_size", "kv_lora_rank"),
                    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
                ),
                REQUIRED,
            ),
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "q_lora_rank": 1536,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
        },
        nulls=frozenset(("num_key_value_heads", "q_lora_rank")),
        spellings={"num_local_experts": "n_routed_experts"},
    ),
    "gemma3_text": ConfigKeys(
        defaults={
            **_SIZES,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "layer_types": None,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        nulls=frozenset(("layer_types",)),
    ),
    "gpt2": ConfigKeys(
        defaults={
            **dict.fromkeys(("n_layer", "n_embd", "n_head"), REQUIRED),
            **dict.fromkeys(("vocab_size", "n_positions"), REQUIRED),
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
        },
        nulls=frozenset(("n_inner",)),
        spellings={
            "num_hidden_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
    ),
    "t5": ConfigKeys(
        defaults={
            **dict.fromkeys(("num_layers", "d_model", "num_heads"), REQUIRED),
            **dict.fromkeys(("d_kv", "d_ff", "vocab_size"), REQUIRED),
            "num_decoder_layers": None,
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
            "tie_word_embeddings": True,
            "scale_decoder_outputs": None,
            "layer_norm_epsilon": 1e-6,
        },
        nulls=frozenset(("num_decoder_layers",)),
        spellings={
            "num_hidden_layers": "num_layers",
            "hidden_size": "d_model",
            "num_attention_heads": "num_heads",
            "head_dim": "d_kv",
        },
    ),
    "vit": ConfigKeys(
        defaults={
            **{key: one for key, one in _SIZES.items() if key != "vocab_size"},
            **dict.fromkeys(("image_size", "patch_size"), REQUIRED),
            "num_channels": 3,
            # None: as many as `id2label` has.
            "num_labels": None,
            "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
            "layer_norm_eps": 1e-12,
        },
    ),
}
NULL_IS_ABSENT = frozenset(
    (
        *("architectures", "id2label", "layer_types", "mlp_only_layers"),
        *("moe_layer_freq", "partial_rotary_factor", "rope_theta", "scoring_func"),
        *("topk_method", "use_bidirectional_attention"),
    )
)
"""Keys for which null means the same as leaving them out."""
_POSITIVE = frozenset(
    (
        *("num_key_value_heads", "head_dim", "n_inner", "q_lora_rank"),
        *("query_pre_attn_scalar", "num_decoder_layers"),
    )
)
"""Keys that must not be 0: Transformers takes 0 as a size, our configs as absent."""


def with_defaults(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a config's values, with Transformers' defaults for absent keys.

    Args:
        values: Of the `config.json`, nulls among them.
        kind: Its `model_type`, one of `KEYS`.

    Returns:
        All of `values`; each key that is read has its own name and, unless it is
        required and missing, a value.

    Raises:
        InputError: A key is null where null means nothing, or 0 where a size must be
            at least 1, or is given under two names with different values.

    Example:
        >>> given = {"n_embd": 64, "num_hidden_layers": 2}
        >>> values = with_defaults(given, "gpt2")
        >>> values["n_layer"], values["layer_norm_epsilon"], "n_head" in values
        (2, 1e-05, False)
    """
    keys = KEYS[kind]
    full = _with_canonical_names(values, keys)
    for key, default in keys.defaults.items():
        if full.get(key) is None:
            _check_null(full, key, keys)
            if default is not REQUIRED and not (key in full and key in keys.nulls):
                full[key] = default
            elif default is REQUIRED:
                full.pop(key, None)
        elif key in _POSITIVE and full[key] == 0:
            raise InputError(
                f"{key}={full[key]!r}: must be at least 1", key="value.below_one"
            )
    return full


def _with_canonical_names(
    values: Mapping[str, Any], keys: ConfigKeys
) -> dict[str, Any]:
    named = dict(values)
    for other, key in keys.spellings.items():
        given = named.get(other)
        if given is None:
            continue
        if named.get(key, given) != given:
            raise InputError(
                f"{key}={named[key]!r} and {other}={given!r}, which are two names of "
                "one size: leave one of them out",
                key="weights.contradictory_config_values",
            )
        named[key] = given
    return named


def _check_null(values: Mapping[str, Any], key: str, keys: ConfigKeys) -> None:
    default = keys.defaults[key]
    if key not in values or default is REQUIRED or key in keys.nulls | NULL_IS_ABSENT:
        return
    otherwise = "" if default is None else f", which is {default!r} to Transformers"
    raise InputError(
        f"{key} is null, for which Transformers has no meaning: give a value, or leave "
        f"it out{otherwise}",
        key="weights.null_config_value",
    )


def workload_from_json(path: str | Path) -> Workload:
    """Return the workload of a model's released `config.json`.

    Raises:
        InputError: It is no JSON object, its `model_type` is unknown here, or a size is
            missing.
    """
    values = read_json(path, key="weights.unreadable_json")
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _PLANNED:
        raise InputError(
            f"{str(path)!r} has model_type {kind!r}; known: "
            f"{', '.join(sorted(_PLANNED))}",
            key="weights.unknown_model_type",
        )
    # Keys that would change a block's parameters, which nothing here counts.
    for key in ("attention_bias", "mlp_bias", "mlp_only_layers"):
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
    try:
        given = with_defaults(values, kind)
        sizes = sizes_from_config(given, kind)
        if kind == "gpt2":
            return Workload(**{"name": str(path), **GPT2_FIELDS, **sizes})
        others = {
            "ffn": given.get("intermediate_size") or 0,
            "kv_heads": given["num_key_value_heads"] or given["num_attention_heads"],
            "seq": given.get("max_position_embeddings") or 2048,
            "tied": bool(given.get("tie_word_embeddings")),
        }
        return Workload(**{"name": str(path), **LLAMA_FIELDS, **others, **sizes})
    except KeyError as error:
        raise InputError(
            f"{str(path)!r} does not give {error}", key="weights.missing_config_value"
        ) from error
    except InputError as error:
        raise InputError(f"{str(path)!r}: {error}", key=error.key) from error


def sizes_from_config(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the sizes of a `config.json` under the names of `Workload`'s fields.

    Args:
        values: Its values, `with_defaults`.
        kind: Its `model_type`: `gpt2`, `deepseek_v3` or a Llama-like one.

    Raises:
        KeyError: A size is missing.
    """
    if kind == "gpt2":
        return {
            "layers": values["n_layer"],
            "hidden": values["n_embd"],
            "heads": values["n_head"],
            "vocab": values["vocab_size"],
            "ffn": values["n_inner"] or 0,
            "seq": values["n_positions"],
        }
    heads = values["num_attention_heads"]
    sizes = {
        "layers": values["num_hidden_layers"],
        "hidden": values["hidden_size"],
        "heads": heads,
        "vocab": values["vocab_size"],
    }
    if kind == "deepseek_v3":
        return {
            **sizes,
            "ffn": values["intermediate_size"],
            "experts": values["n_routed_experts"],
            "top_k": values["num_experts_per_tok"],
            "expert_ffn": values["moe_intermediate_size"],
            "shared_experts": values["n_shared_experts"],
            "dense_layers": values["first_k_dense_replace"],
            "q_lora_rank": values["q_lora_rank"] or 0,
            **{name: values[name] for name in _LATENT},
        }
    sizes |= {
        "kv_heads": values["num_key_value_heads"] or heads,
        "head_dim": values["head_dim"] or 0,
        "tied": values["tie_word_embeddings"],
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
    }
    routed = _ROUTED.get(kind)
    if routed is None:
        qkv_bias = kind == "qwen2"
        return {**sizes, "ffn": values["intermediate_size"], "qkv_bias": qkv_bias}
    experts, expert_ffn = routed
    return {
        **sizes,
        "experts": values[experts],
        "top_k": values["num_experts_per_tok"],
        "expert_ffn": values[expert_ffn],
    }


_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_ROUTED = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
}
"""Keys of the number of experts and of their hidden size."""

_PLANNED = (
    *("gpt2", "llama", "mistral", "qwen2", "qwen3"),
    *("qwen3_moe", "mixtral", "deepseek_v3"),
)
"""Model types whose workload follows from their sizes."""
