"""Decoders with routed experts: Mixtral, Qwen3-MoE, and DeepSeek-V3-like.

A Llama's blocks with a `RoutedMLP` in place of the MLP; the first `dense_layers` have a
plain one, and with `kv_lora_rank` attention is of latents. Settings of it are in
`meshpar.models.presets`. Of DeepSeek-V3 the multi-token prediction is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from flax import nnx

from meshpar import Blocks, InputError, Model, Scope, from_nnx
from meshpar.model.block_run import Sums
from meshpar.models.family import Family, workload_sizes
from meshpar.models.field_types import (
    check_field_types,
    check_heads,
    check_kv_heads,
    check_least_zero,
    check_rotated,
    check_sizes,
)
from meshpar.models.inputs import language_inputs
from meshpar.models.layers.attention import Attention, depth_scaled_std
from meshpar.models.layers.latent_attention import LatentAttention, LatentSizes
from meshpar.models.layers.mlp import GatedMLP
from meshpar.models.layers.norm import RMSNorm
from meshpar.models.layers.rope import RopeScaling, YarnScaling, rope_frequencies
from meshpar.models.layers.routed_mlp import AUXILIARY, RoutedMLP
from meshpar.models.layers.router import RouterConfig
from meshpar.models.llama import RESIDUAL, LlamaEnds
from meshpar.parallel.sizes import LOGITS_BYTES
from meshpar.planner.workload.config_json import LLAMA_FIELDS
from meshpar.planner.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Shape of a decoder with routed experts.

    Args:
        layers: Number of blocks.
        embed: Width of the residual stream.
        heads: Attention heads.
        kv_heads: Key and value heads; `heads` when 0. Latent attention has none.
        vocab: Number of tokens.
        experts: Routed experts of a layer.
        top_k: Experts that a token goes to.
        expert_ffn: Hidden size of an expert.
        shared_experts: Experts that every token goes to.
        dense_layers: First layers with a plain MLP.
        ffn: Its hidden size.
        score: `softmax` over the experts, or a `sigmoid` of each; of this and what
            follows up to `bias_rate`, `RouterConfig` says more.
        normalised: Whether a token's weights are divided by their sum.
        scale: Times what its weights then are.
        groups: Groups of experts.
        top_groups: Groups that a token may choose from.
        capacity_factor: Assignments that an expert takes, over its fair share; 0 is no
            limit.
        bias_rate: Step of the bias with which an expert is chosen; 0 is no bias.
        balance_coefficient: Of the load-balancing loss.
        z_coefficient: Of the router z-loss.
        head_dim: Size of a head; `embed / heads` when 0.
        q_lora_rank: Size of the latent of queries; 0 for none.
        kv_lora_rank: Of the latent of keys and values; attention has none when 0, and
            none of the sizes beside it.
        qk_nope_head_dim: Of the part of a query and a key without a position.
        qk_rope_head_dim: Of the part with one.
        v_head_dim: Of a value; no more than both parts.
        max_seq: Longest sequence, no limit when 0; it has no other effect.
        tied: Whether the head reuses the embedding table.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: Stretching for long contexts, if any; `YarnScaling` is for latent
            attention.
        qk_norm: RMSNorm on queries and keys (Qwen3).
        norm_epsilon: Added to the mean square.
        init_std: Standard deviation of the initial weights.
        logits_bytes: Most bytes of logits that a device holds at a time in the loss;
            0 is no limit.

    Raises:
        InputError: A size below 1, a value of the wrong type or out of range, or sizes
            that do not fit together.
    """

    layers: int
    embed: int
    heads: int
    vocab: int
    experts: int
    top_k: int
    expert_ffn: int
    kv_heads: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    ffn: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    capacity_factor: float = 0.0
    bias_rate: float = 0.0
    balance_coefficient: float = 0.01
    z_coefficient: float = 0.001
    head_dim: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    max_seq: int = 0
    tied: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | YarnScaling | None = None
    qk_norm: bool = False
    norm_epsilon: float = 1e-5
    init_std: float = 0.02
    logits_bytes: int = LOGITS_BYTES

    def __post_init__(self) -> None:
        check_field_types(self)
        check_sizes(self, "layers", "embed", "heads", "vocab", "expert_ffn")
        check_least_zero(self, **_MEANING_OF_ZERO)
        if not self.kv_heads and not self.kv_lora_rank:
            object.__setattr__(self, "kv_heads", self.heads)
        _check_layers(self)
        _check_heads(self)
        _ = self.router  # refuses what cannot be routed

    @property
    def size_per_head(self) -> int:
        """Size of a head."""
        return self.head_dim or self.embed // self.heads

    @property
    def router(self) -> RouterConfig:
        """How tokens choose."""
        return RouterConfig(**{name: getattr(self, name) for name in _OF_ROUTER})

    @property
    def latent(self) -> LatentSizes | None:
        """Sizes of latent attention, if it is that."""
        if not self.kv_lora_rank:
            return None
        return LatentSizes(
            q_rank=self.q_lora_rank,
            kv_rank=self.kv_lora_rank,
            nope=self.qk_nope_head_dim,
            rope=self.qk_rope_head_dim,
            value=self.v_head_dim,
        )


_OF_ROUTER = (
    *("experts", "top_k", "score", "normalised", "scale", "groups", "top_groups"),
    *("capacity_factor", "bias_rate"),
)
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_NO_LATENT = dict.fromkeys(("q_lora_rank", "kv_lora_rank", *_LATENT), "no latent")
_MEANING_OF_ZERO = {
    **dict.fromkeys(("shared_experts", "dense_layers", "ffn"), "none"),
    **dict.fromkeys(("max_seq", "logits_bytes"), "no limit"),
    **dict.fromkeys(("balance_coefficient", "z_coefficient"), "no such loss"),
    **_NO_LATENT,
    "head_dim": "embed / heads",
    "kv_heads": "heads",
}


def _check_layers(config: MoEConfig) -> None:
    if config.dense_layers >= config.layers:
        raise InputError(
            f"dense_layers={config.dense_layers} of layers={config.layers}: at least "
            "one layer must be routed; choose a Llama, or raise layers",
            key="model.no_routed_layer",
        )
    if config.dense_layers and not config.ffn:
        raise InputError(
            f"dense_layers={config.dense_layers}, but ffn=0; give the size of their "
            "MLP",
            key="model.dense_layers_without_ffn",
        )


def _check_heads(config: MoEConfig) -> None:
    if config.kv_lora_rank:
        _check_latent(config)
        return
    if isinstance(config.rope_scaling, YarnScaling):
        raise InputError(
            f"rope_scaling={config.rope_scaling} is for latent attention, but "
            "kv_lora_rank=0; give kv_lora_rank, or another scaling",
            key="model.yarn_without_latent",
        )
    for name in ("q_lora_rank", *_LATENT):
        if getattr(config, name):
            raise InputError(
                f"{name}={getattr(config, name)} is for latent attention, but "
                "kv_lora_rank=0; give kv_lora_rank, or leave it out",
                key="model.latent_size_without_rank",
            )
    check_kv_heads(config.heads, config.kv_heads)
    check_heads(config.embed, config.heads, config.head_dim)
    check_rotated(config.size_per_head)


def _check_latent(config: MoEConfig) -> None:
    sizes = {name: getattr(config, name) for name in _LATENT}
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    if 0 in sizes.values() or config.v_head_dim > query:
        raise InputError(
            f"kv_lora_rank={config.kv_lora_rank} with {sizes}: each must be at "
            "least 1, and v_head_dim at most the sum of the others",
            key="model.invalid_latent_sizes",
        )
    if config.qk_rope_head_dim % 2:
        raise InputError(
            f"qk_rope_head_dim={config.qk_rope_head_dim}: must be even, as pairs of "
            "values are rotated",
            key="model.odd_rotary_size",
        )
    unused = {"head_dim": 0, "qk_norm": False}
    if config.kv_heads != config.heads:
        unused["kv_heads"] = 0
    for name, default in unused.items():
        if getattr(config, name) != default:
            raise InputError(
                f"{name}={getattr(config, name)} with kv_lora_rank="
                f"{config.kv_lora_rank}: latent attention has none; leave {name} out, "
                "or kv_lora_rank",
                key="model.unused_with_latent",
            )


class MoEBlock(nnx.Module):
    """Attention and an MLP, each after a norm and added to the residual stream.

    Args:
        config: The shape.
        routed: Whether the MLP has routed experts.
    """

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs, *, routed: bool) -> None:
        stds = {
            "init_std": config.init_std,
            "out_std": depth_scaled_std(config.init_std, config.layers),
        }
        embed, epsilon = config.embed, config.norm_epsilon
        self.attention_norm = RMSNorm(embed, epsilon=epsilon, rngs=rngs)
        self.attention = _attention(config, rngs, stds)
        self.mlp_norm = RMSNorm(embed, epsilon=epsilon, rngs=rngs)
        self.mlp: Any = (
            RoutedMLP(
                embed,
                config.expert_ffn,
                router=config.router,
                shared=config.shared_experts,
                rngs=rngs,
                **stds,
            )
            if routed
            else GatedMLP(embed, config.ffn, rngs=rngs, **stds)
        )

    def attended(self, x: jax.Array, scope: Scope) -> tuple[jax.Array, jax.Array]:
        """The stream after attention, and its norm."""
        normed = scope.constrain(self.attention_norm(x), RESIDUAL)
        normed = scope.save(normed, "attention_normed")
        branch = scope.constrain(self.attention(normed, scope), RESIDUAL)
        x = x + scope.save(branch, "attention_out")
        normed = scope.constrain(self.mlp_norm(x), RESIDUAL)
        return x, scope.save(normed, "mlp_normed")


class DenseBlock(MoEBlock):
    """One of the first blocks."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs, routed=False)

    def __call__(self, x: jax.Array, scope: Scope) -> jax.Array:
        """(batch, seq, embed) -> (batch, seq, embed)."""
        x, normed = self.attended(x, scope)
        return x + scope.constrain(self.mlp(normed, scope), RESIDUAL)


class RoutedBlock(MoEBlock):
    """A block with routed experts."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs, routed=True)

    def __call__(self, x: jax.Array, scope: Scope) -> tuple[jax.Array, Sums]:
        """(batch, seq, embed) -> (batch, seq, embed), and sums of the router."""
        x, normed = self.attended(x, scope)
        y, sums = self.mlp(normed, scope)
        return x + scope.constrain(y, RESIDUAL), sums

    def update_state(self, sums: Sums) -> None:
        """The router's state after a step."""
        self.mlp.router.update(sums)


def _attention(config: MoEConfig, rngs: nnx.Rngs, stds: dict[str, float]) -> nnx.Module:
    latent = config.latent
    size = config.size_per_head if latent is None else latent.rope
    frequencies = rope_frequencies(size, config.rope_theta, config.rope_scaling)
    epsilon = config.norm_epsilon
    if latent is not None:
        scaling = config.rope_scaling
        is_yarn = isinstance(scaling, YarnScaling)
        return LatentAttention(
            config.embed,
            heads=config.heads,
            sizes=latent,
            frequencies=frequencies,
            epsilon=epsilon,
            amplitude=scaling.amplitude if is_yarn else 1.0,
            score_factor=scaling.score_factor if is_yarn else 1.0,
            rngs=rngs,
            **stds,
        )
    return Attention(
        config.embed,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=size,
        frequencies=frequencies,
        qk_norm_epsilon=epsilon if config.qk_norm else None,
        rngs=rngs,
        **stds,
    )


def moe(config: MoEConfig) -> Model:
    """The model of a config, under meshpar's contract."""
    routed = Blocks(
        block=lambda rngs: RoutedBlock(config, rngs),
        num_layers=config.layers - config.dense_layers,
        auxiliary={
            **dict.fromkeys(AUXILIARY, 0.0),
            "load_balance": config.balance_coefficient,
            "router_z": config.z_coefficient,
        },
    )
    groups = {"blocks": routed}
    if config.dense_layers:
        dense = Blocks(
            block=lambda rngs: DenseBlock(config, rngs), num_layers=config.dense_layers
        )
        groups = {"dense_blocks": dense, "blocks": routed}
    model = from_nnx(
        ends=lambda rngs: LlamaEnds(config, rngs, tied=config.tied),
        groups=groups,
        inputs=language_inputs(config.vocab),
        per_token=True,
    )
    # A trace does not tell them: a layer's loop over tiles of tokens runs as often as
    # the routes need.
    costs = Workload(**_sizes(config)).layer_costs
    firsts = zip(model.groups, model.first_layers, strict=True)
    return replace(
        model,
        groups=tuple(
            replace(group, costs=costs[first : first + group.num_layers])
            for group, first in firsts
        ),
    )


def _sizes(config: MoEConfig) -> dict[str, Any]:
    """Return the sizes of its `Workload`, whose plain MLPs are as wide as an expert."""
    return {"ffn": config.expert_ffn, **workload_sizes(config, **LLAMA_FIELDS)}


MOE = Family(
    config=MoEConfig,
    build=moe,
    sizes=_sizes,
    fuzzed=(
        "--preset tiny-moe --model layers=4,embed=32,heads=4,kv_heads=2,vocab=64,"
        "experts=8,expert_ffn=16,logits_bytes=3000",
        "--preset tiny-moe-capacity --model layers=3,embed=32,heads=4,kv_heads=4,"
        "vocab=64,experts=12,top_k=3,expert_ffn=24,shared_experts=1,dense_layers=1,"
        "ffn=64",
    ),
)
"""The family; `models/presets.py` has the presets."""
