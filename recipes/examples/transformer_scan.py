"""A Transformer in Flax Linen whose layers are one `nn.scan` with rematerialisation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import meshpar
from recipes.examples.language import SEQ, VOCAB, token_loss
from recipes.examples.language import batch as batch

EMBED, HEADS, LAYERS = 32, 4, 4
optimizer = optax.adamw(1e-3)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        attention = nn.MultiHeadDotProductAttention(HEADS, use_bias=False)
        x = x + attention(nn.RMSNorm()(x), mask=mask)
        hidden = nn.silu(nn.Dense(4 * EMBED, use_bias=False, name="gate")(x))
        return x + nn.Dense(EMBED, use_bias=False, name="down")(hidden), None


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, EMBED)
        mask = nn.make_causal_mask(tokens)
        layers = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        x, _ = layers(name="layers")(embed(tokens), mask)
        return nn.Dense(VOCAB, use_bias=False, name="out")(nn.RMSNorm()(x))


def init(key: jax.Array) -> Any:
    return Transformer().init(key, jnp.zeros((1, SEQ), jnp.int32))


def loss(variables: Any, batch: dict[str, jax.Array], key: Any) -> tuple:
    logits = Transformer().apply(variables, batch["tokens"])
    return token_loss(logits, batch)


BLOCKS = "params/layers"


def model(blocks: str | None = None) -> meshpar.Model:
    names = {"**/gate/kernel": (None, "embed", "mlp")}
    names |= {"**/down/kernel": (None, "mlp", "embed"), "**": None}
    return meshpar.from_loss(init, loss, names=names, blocks=blocks)
