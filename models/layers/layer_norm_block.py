"""A transformer block with LayerNorm, biases and a plain MLP: GPT-2's, ViT's."""

from __future__ import annotations

import jax
from flax import nnx

from meshpar import Scope
from models.layers.attention import Attention, depth_scaled_std
from models.layers.mlp import PlainMLP
from models.layers.norm import LayerNorm

RESIDUAL = ("batch", "residual_seq", "embed")


class LayerNormBlock(nnx.Module):
    """Attention and MLP, each after a norm and added to the residual stream.

    Args:
        embed, heads, ffn: Sizes.
        layers: Blocks of the model, which scale the branches' initial outputs.
        norm_epsilon: Added to the variance.
        init_std: Standard deviation of the initial weights.
        dropout: Share of values dropped after each branch.
        causal: Whether a token sees none that follow it.
    """

    def __init__(
        self,
        embed: int,
        *,
        heads: int,
        ffn: int,
        layers: int,
        norm_epsilon: float,
        init_std: float,
        dropout: float,
        rngs: nnx.Rngs,
        causal: bool = True,
    ) -> None:
        out_std = depth_scaled_std(init_std, layers)
        self.dropout = dropout
        self.attention_norm = LayerNorm(embed, epsilon=norm_epsilon, rngs=rngs)
        self.attention = Attention(
            embed,
            heads=heads,
            kv_heads=heads,
            head_dim=embed // heads,
            init_std=init_std,
            out_std=out_std,
            rngs=rngs,
            bias=True,
            out_bias=True,
            causal=causal,
        )
        self.mlp_norm = LayerNorm(embed, epsilon=norm_epsilon, rngs=rngs)
        self.mlp = PlainMLP(embed, ffn, init_std=init_std, out_std=out_std, rngs=rngs)

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
