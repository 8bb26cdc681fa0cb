"""nanoGPT in Flax NNX: a module with a list of blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar
from recipes.examples.language import SEQ, VOCAB, token_loss
from recipes.examples.language import batch as batch

EMBED, HEADS, LAYERS = 32, 4, 4
optimizer = optax.adamw(1e-3)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query = nnx.Linear(EMBED, EMBED, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(EMBED, EMBED, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(EMBED, EMBED, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(EMBED, EMBED, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, seq, _ = x.shape
        heads = (batch, seq, HEADS, EMBED // HEADS)
        q, k, v = (
            layer(x).reshape(heads) for layer in (self.query, self.key, self.value)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(EMBED // HEADS)
        scores = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return self.out(mixed.reshape(batch, seq, EMBED))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(EMBED, rngs=rngs)
        self.attn = Attention(rngs)
        self.norm2 = nnx.LayerNorm(EMBED, rngs=rngs)
        self.up = nnx.Linear(EMBED, 4 * EMBED, rngs=rngs)
        self.down = nnx.Linear(4 * EMBED, EMBED, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.positions = nnx.Embed(SEQ, EMBED, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.tokens.attend(self.norm(x))


def init(key: jax.Array) -> GPT:
    return GPT(nnx.Rngs(key))


def loss(gpt: GPT, batch: dict[str, jax.Array], key: Any) -> tuple:
    logits = gpt(batch["tokens"])
    return token_loss(logits, batch)


BLOCKS = "layers"


def model(blocks: str | None = None) -> meshpar.Model:
    columns, rows = ("embed", "mlp"), ("mlp", "embed")
    names = {"**/up/kernel": columns, "**/up/bias": ("mlp",), "**/down/kernel": rows}
    return meshpar.from_loss(init, loss, names={**names, "**": None}, blocks=blocks)
