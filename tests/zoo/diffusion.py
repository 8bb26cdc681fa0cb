"""A Diffusion Transformer of `models` beside a plain one.

Noise, times and dropped labels are drawn from keys of (seed, step, name, example), made
here as the documentation of `Scope.uniform` and `Scope.normal` says.
"""

import functools
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.models.dit import DiTConfig, dit
from tests.zoo.entry import Entry
from tests.zoo.plain import SEED, normal

IMAGE, PATCH, CHANNELS, CLASSES = 8, 2, 2, 5
EMBED, HEADS, HIDDEN, WAVES, STD = 16, 8, 32, 256, 0.2
COLUMNS = IMAGE // PATCH
TOKENS, VALUES = COLUMNS**2, PATCH * PATCH * CHANNELS
DROPPED = 0.4
OUTSIDE = np.uint32(0xFFFFFFFF)  # the layer of what is in no block


def zeros(*shape):
    return nnx.Param(jnp.zeros(shape))


def waves(values, size):
    """Cosines, then sines, at frequencies from 1 down to almost 1 / 10000."""
    frequencies = jnp.asarray(
        [10_000 ** (-at / (size // 2)) for at in range(size // 2)]
    )
    angles = jnp.outer(values.astype(jnp.float32), frequencies)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1)


def normed(x, shift, scale):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-6) * (1 + scale) + shift


class Modulation(nnx.Module):
    def __init__(self, rngs, parts):
        self.weights = normal(rngs, (EMBED, parts, EMBED), std=STD)
        self.bias = zeros(parts, EMBED)

    def __call__(self, condition):
        vectors = jnp.tensordot(jax.nn.silu(condition), self.weights[...], 1)
        return jnp.moveaxis(vectors + self.bias[...], 1, 0)[:, :, None]


class Attention(nnx.Module):
    def __init__(self, rngs):
        size = EMBED // HEADS
        self.qkv = normal(rngs, (EMBED, HEADS, 3, size), std=STD)
        self.out = normal(rngs, (HEADS, size, EMBED), std=STD)
        self.bias = zeros(HEADS, 3, size)
        self.out_bias = zeros(EMBED)

    def __call__(self, x):
        qkv = jnp.einsum("btd,dnph->pbnth", x, self.qkv[...])
        q, k, v = qkv + jnp.moveaxis(self.bias[...], 1, 0)[:, None, :, None]
        scores = q @ jnp.swapaxes(k, -1, -2) / math.sqrt(EMBED // HEADS)
        mixed = jax.nn.softmax(scores) @ v
        return jnp.einsum("bnth,nhd->btd", mixed, self.out[...]) + self.out_bias[...]


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.up = normal(rngs, (EMBED, HIDDEN), std=STD)
        self.up_bias = zeros(HIDDEN)
        self.down = normal(rngs, (HIDDEN, EMBED), std=STD)
        self.down_bias = zeros(EMBED)

    def __call__(self, x):
        hidden = jax.nn.gelu(x @ self.up[...] + self.up_bias[...], approximate=True)
        return hidden @ self.down[...] + self.down_bias[...]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.modulation = Modulation(rngs, 6)
        self.attention = Attention(rngs)
        self.mlp = MLP(rngs)

    def __call__(self, x, condition):
        shift, scale, gate, *of_mlp = self.modulation(condition)
        x = x + gate * self.attention(normed(x, shift, scale))
        shift, scale, gate = of_mlp
        return x + gate * self.mlp(normed(x, shift, scale))


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.patch_embed = normal(rngs, (VALUES, EMBED), std=STD)
        self.patch_bias = zeros(EMBED)
        self.time_in = normal(rngs, (WAVES, EMBED), std=STD)
        self.time_in_bias = zeros(EMBED)
        self.time_out = normal(rngs, (EMBED, EMBED), std=STD)
        self.time_out_bias = zeros(EMBED)
        self.label_embed = normal(rngs, (CLASSES + 1, EMBED), std=STD)
        self.final_modulation = Modulation(rngs, 2)
        self.out = normal(rngs, (EMBED, VALUES), std=STD)
        self.out_bias = zeros(VALUES)

    def condition(self, times, labels):
        hidden = waves(1000 * times, WAVES) @ self.time_in[...] + self.time_in_bias[...]
        time = jax.nn.silu(hidden) @ self.time_out[...] + self.time_out_bias[...]
        return time + self.label_embed[...][labels]

    def start(self, patches):
        places = np.arange(TOKENS)
        halves = [
            waves(jnp.asarray(one), EMBED // 2) for one in divmod(places, COLUMNS)
        ]
        x = patches @ self.patch_embed[...] + self.patch_bias[...]
        return x + jnp.concatenate(halves, axis=1)

    def finish(self, x, condition):
        x = normed(x, *self.final_modulation(condition))
        return x @ self.out[...] + self.out_bias[...]


def velocity(whole, patches, times, labels):
    """What the plain model predicts of noisy patches."""
    condition, x = whole.ends.condition(times, labels), whole.ends.start(patches)
    for block in whole.blocks:
        x = block(x, condition)
    return whole.ends.finish(x, condition)


def draws(step, examples):
    """Noise, times, and which labels are dropped."""
    random = jax.random.fold_in(jax.random.key(SEED), np.uint32(0xD0))
    random = jax.random.fold_in(random, step)

    def drawn(name, draw):
        key = jax.random.fold_in(random, zlib.crc32(name.encode()))
        key = jax.random.fold_in(key, OUTSIDE)
        return jax.vmap(lambda at: draw(jax.random.fold_in(key, at)))(
            jnp.arange(examples, dtype=jnp.uint32)
        )

    noise = drawn("noise", lambda key: jax.random.normal(key, (TOKENS, VALUES)))
    return (
        noise,
        drawn("time", jax.random.uniform),
        drawn("label", jax.random.uniform) < DROPPED,
    )


def loss(whole, batch, step, prediction="flow"):
    noise, times, dropped = draws(step, len(batch["labels"]))
    clean, t = batch["patches"], times[:, None, None]
    if prediction == "flow":
        noisy, target = clean + t * (noise - clean), noise - clean
    else:
        sine, cosine = jnp.sin(math.pi * t / 2), jnp.cos(math.pi * t / 2)
        noisy, target = cosine * clean + sine * noise, cosine * noise - sine * clean
    labels = jnp.where(dropped, CLASSES, batch["labels"])
    error = (velocity(whole, noisy, times, labels) - target) ** 2
    weights = batch["weights"]
    return jnp.sum(error.mean((1, 2)) * weights) / jnp.sum(weights)


def batch():
    rng = np.random.default_rng(6)
    return {
        "patches": rng.normal(size=(8, TOKENS, VALUES)).astype(np.float32),
        "labels": rng.integers(0, CLASSES, 8),
        "weights": np.asarray([1, 1, 0.5, 1, 2, 1, 1, 0], np.float32),
    }


def config(layers, prediction="flow"):
    return DiTConfig(
        layers=layers,
        embed=EMBED,
        heads=HEADS,
        image=IMAGE,
        patch=PATCH,
        channels=CHANNELS,
        classes=CLASSES,
        ffn=HIDDEN,
        prediction=prediction,
        label_dropout=DROPPED,
        init_std=STD,
        modulation_std=STD,
    )


def model(layers, prediction="flow"):
    return dit(config(layers, prediction))


def entry(prediction):
    return Entry(
        model=functools.partial(model, prediction=prediction),
        ends=Ends,
        groups=lambda layers: {"blocks": (Block, layers)},
        batch=batch,
        loss=functools.partial(loss, prediction=prediction),
    )


DIT, DIT_V = entry("flow"), entry("v")
