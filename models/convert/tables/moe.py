"""Mixtral and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar import InputError
from meshpar.models.convert.rope_json import Rope
from meshpar.models.convert.row import Row
from meshpar.models.convert.tables import deepseek
from meshpar.models.convert.tables.attention import attention
from meshpar.models.convert.tables.llama import LAYER, NORMS, decoder_sizes, ends
from meshpar.models.family import config_sizes
from meshpar.models.moe import MoEConfig
from meshpar.planner.workload.config_json import sizes_from_config

COMPUTED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "mixtral": {
        "architectures": ("MixtralForCausalLM",),
        "hidden_act": ("silu", "swish"),
        "sliding_window": (None,),
    },
    "qwen3_moe": {
        "architectures": ("Qwen3MoeForCausalLM",),
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        "use_sliding_window": (False,),
    },
}
_MIXTRAL = f"{LAYER}.block_sparse_moe"
_EXPERT = _MIXTRAL + ".experts.{expert}"

# E experts, D embed, F mlp.
MIXTRAL = (
    Row(f"{_MIXTRAL}.gate.weight", "blocks.mlp.router.scores", "E D -> D E"),
    Row(f"{_EXPERT}.w1.weight", "blocks.mlp.gate_up[:, :, 0]", "F D -> expert D F"),
    Row(f"{_EXPERT}.w3.weight", "blocks.mlp.gate_up[:, :, 1]", "F D -> expert D F"),
    Row(f"{_EXPERT}.w2.weight", "blocks.mlp.down", "D F -> expert F D"),
)


def table(config: MoEConfig) -> tuple[Row, ...]:
    """Their names, our paths."""
    if router_kind(config) == "deepseek_v3":
        return deepseek.table(config)
    normed = config.qk_norm
    return (
        *ends(tied=config.tied),
        *NORMS,
        *attention(f"{LAYER}.self_attn", "blocks.attention", bias=False, norm=normed),
        *(deepseek.EXPERTS if normed else MIXTRAL),
    )


def router_kind(config: MoEConfig) -> str:
    """Which of theirs it is.

    Raises:
        InputError: None is like it.
    """
    if config.latent is not None:
        return "deepseek_v3"
    for name, theirs in _ONLY_OF_DEEPSEEK.items():
        if getattr(config, name) != theirs:
            raise InputError(
                f"{name}={getattr(config, name)!r}: neither mixtral nor qwen3_moe has "
                f"it, whose is {theirs!r}; export a model without",
                key="weights.only_of_deepseek",
            )
    if not config.qk_norm and not config.normalised:
        raise InputError(
            "normalised=False without qk_norm: mixtral normalises, and qwen3_moe has "
            "norms of queries and keys; export a model that does as one of them",
            key="weights.unnormalised_without_qk_norm",
        )
    return "qwen3_moe" if config.qk_norm else "mixtral"


_ONLY_OF_DEEPSEEK = {
    "shared_experts": 0,
    "dense_layers": 0,
    "score": "softmax",
    "scale": 1.0,
    "groups": 1,
    "capacity_factor": 0.0,
    "bias_rate": 0.0,
}


def from_json(values: Mapping[str, Any], kind: str, rope: Rope) -> MoEConfig:
    """Our config of theirs.

    Args:
        values: Of the `config.json`, with defaults.
        kind: `mixtral` or `qwen3_moe`.
        rope: Its rotary positions.

    Raises:
        KeyError: A size, or a number of the rotary positions, is missing.
        InputError: A size is not a whole number, or sizes contradict one another.
    """
    return MoEConfig(
        **config_sizes(sizes_from_config(values, kind)),
        normalised=values["norm_topk_prob"] if kind == "qwen3_moe" else True,
        balance_coefficient=values["router_aux_loss_coef"],
        norm_epsilon=values["rms_norm_eps"],
        rope_theta=rope.theta(values["rope_theta"]),
        rope_scaling=rope.scaling(),
    )


def to_json(config: MoEConfig) -> dict[str, Any]:
    """A `config.json` of the model."""
    kind = router_kind(config)
    if kind == "deepseek_v3":
        return deepseek.to_json(config)
    same = {
        "model_type": kind,
        **decoder_sizes(config),
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "router_aux_loss_coef": config.balance_coefficient,
        "hidden_act": "silu",
    }
    if kind == "mixtral":
        return {
            "architectures": ["MixtralForCausalLM"],
            **same,
            "intermediate_size": config.expert_ffn,
            "sliding_window": None,
        }
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        **same,
        "num_experts": config.experts,
        "moe_intermediate_size": config.expert_ffn,
        "intermediate_size": config.ffn or config.expert_ffn,
        "norm_topk_prob": config.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
    }
