"""Gemma 3 (Gemma team 2025): windows in most layers, norms on both sides of a branch.

Layers repeat in periods, such as five with a window and one without; a period is one
block, so that each of its layers knows its window before any program runs. What is left
over at the end is a group of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from meshpar import Blocks, InputError, Model, Scope, from_nnx
from meshpar.models.family import Family
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
from meshpar.models.layers.mlp import GatedMLP
from meshpar.models.layers.norm import RMSNorm
from meshpar.models.layers.rope import rope_frequencies
from meshpar.models.llama import RESIDUAL, LlamaEnds
from meshpar.parallel.sizes import LOGITS_BYTES


@dataclass(frozen=True, kw_only=True)
class Gemma3Config:
    """Shape of a Gemma 3.

    Args:
        layers: Number of layers.
        embed: Width of the residual stream.
        heads: Attention heads.
        kv_heads: Key and value heads; each serves `heads / kv_heads` queries.
        head_dim: Size of a head.
        ffn: Hidden size of the MLP.
        vocab: Number of tokens.
        period: Layers of which the last sees all tokens and the others a window.
        window: A token of theirs attends to those less than so many places before it.
        query_size: Scores are divided by its root; `head_dim` when 0.
        max_seq: Longest sequence, no limit when 0; it has no other effect.
        rope_theta: Base of the rotary wavelengths where all tokens are seen.
        rope_factor: What those are stretched by.
        local_rope_theta: Base where a window is.
        norm_epsilon: Added to the mean square.
        init_std: Standard deviation of the initial weights.
        logits_bytes: Most bytes of logits that a device holds at a time in the loss;
            0 is no limit.

    Raises:
        InputError: A size that is no whole number or below 1, another value of the
            wrong type, or heads that do not divide.
    """

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    period: int = 6
    window: int = 512
    query_size: int = 0
    max_seq: int = 0
    rope_theta: float = 1_000_000.0
    rope_factor: float = 1.0
    local_rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    init_std: float = 0.02
    logits_bytes: int = LOGITS_BYTES

    def __post_init__(self) -> None:
        check_field_types(self)
        check_sizes(self, "layers", "embed", "heads", "kv_heads", "head_dim", "ffn")
        check_sizes(self, "vocab", "period", "window")
        no_limit = dict.fromkeys(("max_seq", "logits_bytes"), "no limit")
        check_least_zero(self, query_size="head_dim", **no_limit)
        check_heads(self.embed, self.heads, self.head_dim)
        check_rotated(self.head_dim)
        check_kv_heads(self.heads, self.kv_heads)
        if self.layers < self.period:
            raise InputError(
                f"period={self.period} of layers={self.layers}: there must be a whole "
                "period; lower it, or raise layers",
                key="model.period_above_layers",
            )

    @property
    def size_per_head(self) -> int:
        """Size of a head."""
        return self.head_dim

    @property
    def left_over(self) -> int:
        """Layers after the last whole period."""
        return self.layers % self.period


class Gemma3Layer(nnx.Module):
    """Attention and MLP, each between two norms and added to the residual stream.

    Args:
        config: The shape.
        local: Whether a token sees a window.
    """

    def __init__(self, config: Gemma3Config, rngs: nnx.Rngs, *, local: bool) -> None:
        stds = {
            "init_std": config.init_std,
            "out_std": depth_scaled_std(config.init_std, config.layers),
        }
        theta = config.local_rope_theta if local else config.rope_theta
        frequencies = rope_frequencies(config.head_dim, theta)
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(
            config.embed,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            rngs=rngs,
            frequencies=frequencies if local else frequencies / config.rope_factor,
            qk_norm_epsilon=config.norm_epsilon,
            qk_norm_around_one=True,
            window=config.window if local else None,
            score_scale=config.query_size**-0.5 if config.query_size else None,
            **stds,
        )
        self.attention_out_norm = _norm(config, rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = GatedMLP(
            config.embed, config.ffn, rngs=rngs, activation="gelu_tanh", **stds
        )
        self.mlp_out_norm = _norm(config, rngs)

    def __call__(self, x: jax.Array, scope: Scope) -> jax.Array:
        """(batch, seq, embed) -> (batch, seq, embed)."""
        normed = scope.constrain(self.attention_norm(x), RESIDUAL)
        normed = scope.save(normed, "attention_normed")
        branch = scope.constrain(self.attention(normed, scope), RESIDUAL)
        branch = scope.save(branch, "attention_out")
        x = x + scope.constrain(self.attention_out_norm(branch), RESIDUAL)
        normed = scope.constrain(self.mlp_norm(x), RESIDUAL)
        normed = scope.save(normed, "mlp_normed")
        branch = scope.constrain(self.mlp(normed, scope), RESIDUAL)
        return x + scope.constrain(self.mlp_out_norm(branch), RESIDUAL)


class Gemma3Block(nnx.Module):
    """Layers one after another, `layer0` and so on.

    Args:
        config: The shape.
        count: How many; the one that would end a period sees all tokens.
    """

    def __init__(self, config: Gemma3Config, rngs: nnx.Rngs, *, count: int) -> None:
        self.count = count
        for at in range(count):
            layer = Gemma3Layer(config, rngs, local=at + 1 < config.period)
            setattr(self, f"layer{at}", layer)

    def __call__(self, x: jax.Array, scope: Scope) -> jax.Array:
        """(batch, seq, embed) -> (batch, seq, embed)."""
        for at in range(self.count):
            x = getattr(self, f"layer{at}")(x, scope)
        return x


def gemma3(config: Gemma3Config) -> Model:
    """The model of a config, under meshpar's contract."""
    groups = {
        "blocks": Blocks(
            block=lambda rngs: Gemma3Block(config, rngs, count=config.period),
            num_layers=config.layers // config.period,
        )
    }
    if config.left_over:
        groups["last_blocks"] = Blocks(
            block=lambda rngs: Gemma3Block(config, rngs, count=config.left_over),
            num_layers=1,
        )
    return from_nnx(
        ends=lambda rngs: LlamaEnds(
            config, rngs, tied=True, embed_scale=config.embed**0.5, around_one=True
        ),
        groups=groups,
        inputs=language_inputs(config.vocab),
        per_token=True,
    )


def _norm(config: Gemma3Config, rngs: nnx.Rngs) -> RMSNorm:
    return RMSNorm(
        config.embed, epsilon=config.norm_epsilon, rngs=rngs, around_one=True
    )


GEMMA3 = Family(
    config=Gemma3Config,
    build=gemma3,
    of_text=True,
    presets={
        "tiny-gemma3": Gemma3Config(
            layers=5,
            embed=64,
            heads=4,
            kv_heads=2,
            head_dim=16,
            ffn=128,
            vocab=256,
            period=2,
            window=16,
        ),
        "gemma3-270m": Gemma3Config(
            layers=18,
            embed=640,
            heads=4,
            kv_heads=1,
            head_dim=256,
            ffn=2048,
            vocab=262_144,
        ),
    },
)
"""With the sizes of the released configs (Hugging Face hub, 2025)."""
