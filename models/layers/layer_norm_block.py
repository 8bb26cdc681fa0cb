"""A transformer block with LayerNorm, biases and a plain MLP: GPT-2's, ViT's."""

from __future__ import annotations

import functools
from typing import Protocol

import jax
from flax import nnx

from meshpar import Scope
from meshpar.models.layers.attention import Attention, depth_scaled_std
from meshpar.models.layers.mlp import Activation, PlainMLP
from meshpar.models.layers.norm import LayerNorm

RESIDUAL = ("batch", "residual_seq", "embed")


class BlockShape(Protocol):
    """Sizes of a config's blocks.

    Args:
        embed, heads: Sizes.
        ffn: Hidden size of the MLP; `4 * embed` when 0.
        layers: Blocks of the model, which scale the branches' initial outputs.
        norm_epsilon: Added to the variance.
        init_std: Standard deviation of the initial weights.
        dropout: Share of values dropped after each branch.
    """

    embed: int
    heads: int
    ffn: int
    layers: int
    norm_epsilon: float
    init_std: float
    dropout: float


class LayerNormBlock(nnx.Module):
    """Attention and MLP, each after a norm and added to the residual stream.

    Args:
        shape: A config.
        causal: Whether a token sees none that follow it.
        activation: Of the MLP.
    """

    def __init__(
        self,
        shape: BlockShape,
        rngs: nnx.Rngs,
        *,
        causal: bool,
        activation: Activation = "gelu_tanh",
    ) -> None:
        embed, std = shape.embed, shape.init_std
        out_std = depth_scaled_std(std, shape.layers)
        norm = functools.partial(LayerNorm, epsilon=shape.norm_epsilon, rngs=rngs)
        self.dropout = shape.dropout
        self.attention_norm = norm(embed)
        self.attention = Attention(
            embed,
            heads=shape.heads,
            kv_heads=shape.heads,
            head_dim=embed // shape.heads,
            init_std=std,
            out_std=out_std,
            rngs=rngs,
            bias=True,
            out_bias=True,
            causal=causal,
        )
        self.mlp_norm = norm(embed)
        self.mlp = PlainMLP(
            embed,
            shape.ffn or 4 * embed,
            init_std=std,
            out_std=out_std,
            rngs=rngs,
            activation=activation,
        )

    def __call__(self, x: jax.Array, scope: Scope) -> jax.Array:
        """(batch, seq, embed) -> (batch, seq, embed)."""
        normed = scope.constrain(self.attention_norm(x), RESIDUAL)
        normed = scope.save(normed, "attention_normed")
        branch = scope.constrain(self.attention(normed, scope), RESIDUAL)
        branch = scope.save(branch, "attention_out")
        x = x + scope.dropout(branch, self.dropout, "attention")
        normed = scope.constrain(self.mlp_norm(x), RESIDUAL)
        normed = scope.save(normed, "mlp_normed")
        branch = scope.constrain(self.mlp(normed, scope), RESIDUAL)
        return x + scope.dropout(branch, self.dropout, "mlp")
