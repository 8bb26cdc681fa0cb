"""DeepSeek-V3 without its multi-token prediction."""

from __future__ import annotations

import functools
import math
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from meshpar import InputError
from meshpar.models.convert.needed import check_needed
from meshpar.models.convert.rope_json import Rope
from meshpar.models.convert.row import Row
from meshpar.models.convert.tables.llama import (
    GATED_MLP,
    LAYER,
    NORMS,
    decoder_sizes,
    ends,
)
from meshpar.models.family import config_sizes
from meshpar.models.layers.rope import RopeScaling, YarnScaling
from meshpar.models.moe import MoEConfig
from meshpar.planner.workload.config_json import sizes_from_config

COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "architectures": ("DeepseekV3ForCausalLM",),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "tie_word_embeddings": (False,),
    # Norms of the latents have it whatever the config says.
    "rms_norm_eps": (1e-6,),
}
_BIAS_RATE = 0.001

# E experts, D embed, F mlp.
EXPERTS = (
    Row(f"{LAYER}.mlp.gate.weight", "blocks.mlp.router.scores", "E D -> D E"),
    *(
        Row(
            f"{LAYER}.mlp.experts.{{expert}}.{name}_proj.weight",
            f"blocks.mlp.gate_up[:, :, {at}]",
            "F D -> expert D F",
        )
        for at, name in enumerate(("gate", "up"))
    ),
    Row(
        f"{LAYER}.mlp.experts.{{expert}}.down_proj.weight",
        "blocks.mlp.down",
        "D F -> expert F D",
    ),
)
_SHARED = f"{LAYER}.mlp.shared_experts"
SHARED = (
    Row(f"{_SHARED}.gate_proj.weight", "blocks.mlp.shared.gate_up[:, 0]", "F D -> D F"),
    Row(f"{_SHARED}.up_proj.weight", "blocks.mlp.shared.gate_up[:, 1]", "F D -> D F"),
    Row(f"{_SHARED}.down_proj.weight", "blocks.mlp.shared.down", "D F -> F D"),
)
BIAS = Row(
    f"{LAYER}.mlp.gate.e_score_correction_bias",
    "blocks.mlp.router.bias",
    of_state=True,
)


def table(config: MoEConfig) -> tuple[Row, ...]:
    """Their names, our paths."""
    both = (*NORMS, *_attention(config))
    dense = [
        replace(row, ours=row.ours.replace("blocks.", "dense_blocks.", 1))
        for row in (*both, *GATED_MLP)
    ]
    routed = (
        *both,
        *EXPERTS,
        *(SHARED if config.shared_experts else ()),
        *((BIAS,) if config.bias_rate else ()),
    )
    return (
        *ends(tied=config.tied),
        *(dense if config.dense_layers else ()),
        *(row.numbered(config.dense_layers, 1) for row in routed),
    )


def _attention(config: MoEConfig) -> tuple[Row, ...]:
    # R rank of a latent, N heads, H head_dim, D embed. Theirs rotate neighbours, ours
    # dim i and i + half: the rotated dims are the last in queries and in the latent.
    theirs, ours = f"{LAYER}.self_attn", "blocks.attention"
    order = {"H": functools.partial(halves_last, rotated=config.qk_rope_head_dim)}
    to_queries = "q_b_proj" if config.q_lora_rank else "q_proj"
    down = (
        Row(f"{theirs}.q_a_proj.weight", f"{ours}.q_down", "R D -> D R"),
        Row(f"{theirs}.q_a_layernorm.weight", f"{ours}.q_norm.scale"),
    )
    return (
        *(down if config.q_lora_rank else ()),
        Row(
            f"{theirs}.{to_queries}.weight",
            f"{ours}.q",
            "(N H) R -> R N H",
            order=order,
        ),
        Row(
            f"{theirs}.kv_a_proj_with_mqa.weight",
            f"{ours}.kv_down",
            "H D -> D H",
            order=order,
        ),
        Row(f"{theirs}.kv_a_layernorm.weight", f"{ours}.kv_norm.scale"),
        Row(f"{theirs}.kv_b_proj.weight", f"{ours}.kv", "(N H) R -> R N H"),
        Row(f"{theirs}.o_proj.weight", f"{ours}.out", "D (N H) -> N H D"),
    )


def halves_last(size: int, *, rotated: int) -> np.ndarray:
    """Their index of each of ours: of the last dims the even ones, then the odd ones.

    Example:
        >>> halves_last(6, rotated=4).tolist()
        [0, 1, 2, 4, 3, 5]
    """
    last = np.arange(size - rotated, size)
    return np.concatenate([np.arange(size - rotated), last[::2], last[1::2]])


def skipped(config: MoEConfig) -> str:
    """Prefixes of the tensors that our model does not have."""
    return f"model.layers.{config.layers}."


def from_json(values: Mapping[str, Any], rope: Rope) -> MoEConfig:
    """Our config of theirs.

    Args:
        values: Of the `config.json`, with defaults.
        rope: Its rotary positions.

    Raises:
        KeyError: A size, or a number of the rotary positions, is missing.
        InputError: A size is not a whole number, `num_key_value_heads` differs from
            `num_attention_heads`, or the rotary positions are scaled in another way.
    """
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if kv_heads not in (None, heads):
        raise InputError(
            f"num_key_value_heads={kv_heads!r} must be num_attention_heads={heads!r}: "
            "latent attention has keys and values for each head; write "
            '"num_key_value_heads": null (left out, it is 128)',
            key="weights.unsupported_config_value",
        )
    return MoEConfig(
        **config_sizes(sizes_from_config(values, "deepseek_v3")),
        score="sigmoid",
        normalised=values["norm_topk_prob"],
        scale=values["routed_scaling_factor"],
        groups=values["n_group"],
        top_groups=values["topk_group"],
        bias_rate=_BIAS_RATE,
        balance_coefficient=values.get("aux_loss_alpha", 0.0001),
        z_coefficient=0.0,
        rope_theta=rope.theta(values["rope_theta"]),
        rope_scaling=None if rope.kind == "default" else _yarn(rope.values),
        norm_epsilon=values["rms_norm_eps"],
    )


def _yarn(rope: Mapping[str, Any]) -> YarnScaling:
    if "attention_factor" in rope or not rope.get("truncate", True):
        raise InputError(
            f"rope_scaling={dict(rope)!r} is not known here; known: type yarn without "
            "attention_factor and truncate",
            key="weights.unknown_rope_scaling",
        )
    for name in ("factor", "mscale", "mscale_all_dim"):
        value = rope.get(name, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(
                f"{name}={reprlib.repr(value)} of rope_scaling: must be a number",
                key="value.not_number",
            )
    factor = rope["factor"]
    scale, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    amplitude = _sharpened(factor, 1.0)
    if scale and all_dims:
        amplitude = _sharpened(factor, scale) / _sharpened(factor, all_dims)
    return YarnScaling(
        factor=factor,
        original_seq=rope["original_max_position_embeddings"],
        # To Transformers a 0 is one that is left out.
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        amplitude=amplitude,
        score_factor=_sharpened(factor, all_dims) ** 2 if all_dims else 1.0,
    )


def _sharpened(factor: float, scale: float) -> float:
    """Peng et al. 2023, equation 22, times their `mscale`."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def to_json(config: MoEConfig) -> dict[str, Any]:
    """A `config.json` of the model.

    Raises:
        InputError: Theirs computes something else.
    """
    needed = {
        "score": "sigmoid",
        "tied": False,
        "qk_norm": False,
        "norm_epsilon": 1e-6,
        "capacity_factor": 0.0,
    }
    check_needed(config, needed, "deepseek_v3")
    if not config.bias_rate:
        raise InputError(
            "bias_rate=0.0: every router of deepseek_v3 has a bias; export a model "
            "that has it, too",
            key="weights.router_without_bias",
        )
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{**decoder_sizes(replace(config, rope_scaling=None)), **_rope(config)},
        "head_dim": config.qk_rope_head_dim,
        # Ours has none, 0; theirs divides the heads by their number.
        "num_key_value_heads": config.heads,
        "intermediate_size": config.ffn or config.expert_ffn,
        "moe_intermediate_size": config.expert_ffn,
        "n_routed_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "n_shared_experts": config.shared_experts,
        "first_k_dense_replace": config.dense_layers,
        "norm_topk_prob": config.normalised,
        "routed_scaling_factor": config.scale,
        "n_group": config.groups,
        "topk_group": config.top_groups,
        "q_lora_rank": config.q_lora_rank or None,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "num_nextn_predict_layers": 0,
        "rope_interleave": True,
        "hidden_act": "silu",
        "attention_bias": False,
    }


def _rope(config: MoEConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {}
    if isinstance(scaling, RopeScaling):
        raise InputError(
            f"rope_scaling={scaling}: deepseek_v3 has YaRN; export a model with "
            "YarnScaling, or without",
            key="weights.rope_scaling_not_yarn",
        )
    log = 0.1 * math.log(scaling.factor)
    all_dims = (math.sqrt(scaling.score_factor) - 1) / log
    rope = {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_seq,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    }
    if all_dims:
        scale = (scaling.amplitude * (1 + log * all_dims) - 1) / log
        rope |= {"mscale": round(scale, 12), "mscale_all_dim": round(all_dims, 12)}
    return {
        "max_position_embeddings": int(scaling.factor * scaling.original_seq),
        "rope_scaling": rope,
        "rope_parameters": {**rope, "rope_theta": float(config.rope_theta)},
    }
