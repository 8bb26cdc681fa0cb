"""GPT-2 in Flax Linen, in the style of transformers' Flax models: `setup`, `h/0`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import meshpar
from recipes.examples.language import SEQ, VOCAB, token_loss
from recipes.examples.language import batch as batch

EMBED, HEADS, LAYERS, DROPOUT = 32, 4, 4, 0.0
optimizer = optax.adamw(1e-3)


class Attention(nn.Module):
    def setup(self) -> None:
        self.c_attn = nn.Dense(3 * EMBED)
        self.c_proj = nn.Dense(EMBED)
        self.resid_dropout = nn.Dropout(DROPOUT)

    def __call__(self, hidden: jax.Array, deterministic: bool) -> jax.Array:
        batch, seq, _ = hidden.shape
        heads = (batch, seq, HEADS, EMBED // HEADS)
        query, key, value = (
            part.reshape(heads) for part in jnp.split(self.c_attn(hidden), 3, axis=-1)
        )
        mask = nn.make_causal_mask(jnp.ones((batch, seq)))
        mixed = nn.dot_product_attention(query, key, value, mask=mask)
        out = self.c_proj(mixed.reshape(batch, seq, EMBED))
        return self.resid_dropout(out, deterministic=deterministic)


class MLP(nn.Module):
    def setup(self) -> None:
        self.c_fc, self.c_proj = nn.Dense(4 * EMBED), nn.Dense(EMBED)
        self.dropout = nn.Dropout(DROPOUT)

    def __call__(self, hidden: jax.Array, deterministic: bool) -> jax.Array:
        hidden = self.c_proj(nn.gelu(self.c_fc(hidden)))
        return self.dropout(hidden, deterministic=deterministic)


class Block(nn.Module):
    def setup(self) -> None:
        self.ln_1, self.ln_2 = nn.LayerNorm(), nn.LayerNorm()
        self.attn, self.mlp = Attention(), MLP()

    def __call__(self, hidden: jax.Array, deterministic: bool) -> jax.Array:
        hidden = hidden + self.attn(self.ln_1(hidden), deterministic)
        return hidden + self.mlp(self.ln_2(hidden), deterministic)


class BlockCollection(nn.Module):
    def setup(self) -> None:
        self.blocks = [Block(name=str(layer)) for layer in range(LAYERS)]

    def __call__(self, hidden: jax.Array, deterministic: bool) -> jax.Array:
        for block in self.blocks:
            hidden = block(hidden, deterministic)
        return hidden


class GPT2(nn.Module):
    def setup(self) -> None:
        self.wte, self.wpe = nn.Embed(VOCAB, EMBED), nn.Embed(SEQ, EMBED)
        self.dropout = nn.Dropout(DROPOUT)
        self.h, self.ln_f = BlockCollection(), nn.LayerNorm()

    def __call__(self, input_ids: jax.Array, deterministic: bool = True) -> jax.Array:
        hidden = self.wte(input_ids) + self.wpe(jnp.arange(input_ids.shape[1]))
        hidden = self.h(
            self.dropout(hidden, deterministic=deterministic), deterministic
        )
        return self.wte.attend(self.ln_f(hidden))


def init(key: jax.Array) -> Any:
    return GPT2().init(key, jnp.zeros((1, SEQ), jnp.int32))


def loss(variables: Any, batch: dict[str, jax.Array], key: Any) -> tuple:
    rngs = {} if key is None else {"dropout": key}
    logits = GPT2().apply(variables, batch["tokens"], key is None, rngs=rngs)
    return token_loss(logits, batch)


BLOCKS = "params/h"


def model(blocks: str | None = None) -> meshpar.Model:
    columns, rows = ("embed", "mlp"), ("mlp", "embed")
    names = {"**/c_fc/kernel": columns, "**/c_fc/bias": ("mlp",)}
    names |= {"**/mlp/c_proj/kernel": rows, "**": None}
    return meshpar.from_loss(init, loss, names=names, blocks=blocks)
