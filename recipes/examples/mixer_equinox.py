"""An MLP-Mixer in Equinox: modules of one example, mapped over the batch."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshpar
from meshpar import Input

PATCHES, PIXELS, EMBED, CLASSES, LAYERS = 16, 12, 32, 10, 4
optimizer = optax.adamw(1e-3)


class MixerBlock(eqx.Module):
    patch_mlp: eqx.nn.MLP
    hidden_mlp: eqx.nn.MLP
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key)
        self.patch_mlp = eqx.nn.MLP(PATCHES, PATCHES, 2 * PATCHES, depth=1, key=keys[0])
        self.hidden_mlp = eqx.nn.MLP(EMBED, EMBED, 4 * EMBED, depth=1, key=keys[1])
        self.norm1 = eqx.nn.LayerNorm((EMBED,))
        self.norm2 = eqx.nn.LayerNorm((EMBED,))

    def __call__(self, y: jax.Array) -> jax.Array:
        y = y + jax.vmap(self.patch_mlp)(jax.vmap(self.norm1)(y).T).T
        return y + jax.vmap(self.hidden_mlp)(jax.vmap(self.norm2)(y))


class Mixer(eqx.Module):
    read: eqx.nn.Linear
    blocks: list[MixerBlock]
    norm: eqx.nn.LayerNorm
    write: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, LAYERS + 2)
        self.read = eqx.nn.Linear(PIXELS, EMBED, key=keys[0])
        self.blocks = [MixerBlock(key) for key in keys[2:]]
        self.norm = eqx.nn.LayerNorm((EMBED,))
        self.write = eqx.nn.Linear(EMBED, CLASSES, key=keys[1])

    def __call__(self, patches: jax.Array) -> jax.Array:
        y = jax.vmap(self.read)(patches)
        for block in self.blocks:
            y = block(y)
        return self.write(jax.vmap(self.norm)(y).mean(axis=0))


def init(key: jax.Array) -> Mixer:
    return Mixer(key)


def loss(mixer: Mixer, batch: dict[str, jax.Array], key: Any) -> tuple:
    logits = jax.vmap(mixer)(batch["patches"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.sum(), jnp.float32(losses.size)


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    patches = rng.random((8, PATCHES, PIXELS), np.float32)
    return {"patches": patches, "label": rng.integers(0, CLASSES, 8)}


BLOCKS = "blocks"


def model(blocks: str | None = None) -> meshpar.Model:
    patches = Input(("batch", None, None), shape=(None, PATCHES, PIXELS))
    inputs = {"patches": patches, "label": Input(("batch",), "int", below=CLASSES)}
    names = {"**/hidden_mlp/layers/0/weight": ("mlp", "embed")}
    names |= {"**/hidden_mlp/layers/1/weight": ("embed", "mlp"), "**": None}
    return meshpar.from_loss(init, loss, names=names, blocks=blocks, inputs=inputs)
