"""The keys of a GGUF file's model, each read, of no effect, or refused.

What a key means is what llama.cpp does with it. A key that is not here may change a
model, so it is refused whatever it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar import InputError
from meshpar.models.convert.gguf_file import GGUFFile

_READ = frozenset(
    (
        *("block_count", "embedding_length", "feed_forward_length"),
        *("attention.head_count", "attention.head_count_kv"),
        *("attention.layer_norm_rms_epsilon", "attention.scale"),
        *("attention.key_length", "attention.value_length"),
        *("rope.dimension_count", "rope.freq_base"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"),
    )
)
_READ_OF: Mapping[str, frozenset[str]] = {
    "llama": _READ,
    "gemma3": _READ
    | {
        *("attention.sliding_window", "attention.sliding_window_pattern"),
        *("attention.key_length_swa", "attention.value_length_swa"),
        *("rope.dimension_count_swa", "rope.freq_base_swa"),
    },
}

# Key -> the values with which llama.cpp computes what it computes without the key;
# None: with any value. The table of tokens is `vocab_size` long.
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(
        (
            *("vocab_size", "context_length", "tensor_data_layout"),
            *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
        )
    ),
    **dict.fromkeys(
        (
            *("attention.sliding_window", "attention.clamp_kqv"),
            *("attention.max_alibi_bias", "attention.shared_kv_layers"),
            *("attn_logit_softcapping", "final_logit_softcapping"),
            *("router_logit_softcapping", "rope.scaling.alpha"),
            *("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor"),
            *("expert_count", "expert_used_count", "expert_shared_count"),
            *("expert_feed_forward_length", "leading_dense_block_count"),
            *("nextn_predict_layers", "pooling_type"),
        ),
        (0,),
    ),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    # 0 is a scale that is not given.
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 1)),
}


def check_keys(file: GGUFFile, kind: str) -> None:
    """Check that each key of a file's model is read, or has a value without effect.

    Args:
        file: The file.
        kind: Its architecture, which its keys begin with.

    Raises:
        InputError: The file is a part of a model, or an adapter of one; or a key is
            unknown, or has a value that no model here computes.
    """
    what = file.metadata("general.type", "model")
    if what != "model":
        raise InputError(
            f"{file.where!r} has general.type={what!r}; known: model",
            key="weights.unsupported_gguf_value",
        )
    for key in file.keys:
        name = key.removeprefix(f"{kind}.")
        if name == key or name in _READ_OF[kind]:
            continue
        value = file.metadata(key)
        if name not in _WITHOUT_EFFECT:
            raise InputError(
                f"{file.where!r} has {key}={value!r}, a key that is not known here and "
                "may change the model; take the model's safetensors",
                key="weights.unknown_gguf_key",
            )
        accepted = _WITHOUT_EFFECT[name]
        if accepted is None:
            continue
        is_bool = isinstance(value, bool)
        if value not in accepted or is_bool != isinstance(accepted[0], bool):
            raise InputError(
                f"{file.where!r} has {key}={value!r}, which no model here computes; "
                f"known: {' or '.join(map(str, accepted))}",
                key="weights.unsupported_gguf_value",
            )


def check_value(file: GGUFFile, key: str, wanted: float) -> None:
    """Check that a key, if the file has it, has the wanted value.

    Raises:
        InputError: It has another value.
    """
    value = number(file, key, wanted)
    # Stored in fp32. A NaN is within no bound.
    if not abs(value - wanted) <= 1e-6 * abs(wanted):
        raise InputError(
            f"{file.where!r} has {key}={value!r}; known: {wanted!r}",
            key="weights.unsupported_gguf_value",
        )


def number(file: GGUFFile, key: str, default: Any = None) -> Any:
    """Return the number of a key; of a list with one for each layer, their one value.

    Raises:
        InputError: The file lacks the key and there is no default, or its value is no
            number, or differs between layers.
    """
    value = file.metadata(key)
    if isinstance(value, list):
        if not value or any(one != value[0] for one in value):
            raise InputError(
                f"{file.where!r} has {key}={value!r}; known: one value in all layers",
                key="weights.unsupported_gguf_value",
            )
        value = value[0]
    if value is None and default is not None:
        return default
    if value is None:
        raise InputError(
            f"{file.where!r} does not say {key}", key="weights.missing_config_value"
        )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(
            f"{file.where!r} has {key}={value!r}; it must be a number",
            key="weights.unsupported_gguf_value",
        )
    return value
