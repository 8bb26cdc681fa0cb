"""Conditioned blocks that denoise: condition in the stream, noise of each example.

The condition has a gradient and changes on its way; noise and times are drawn from keys
of (seed, step, name, example), made here as the documentation of `Scope.key` says.
"""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar import Input, from_nnx
from tests.zoo.entry import Entry
from tests.zoo.plain import SEED, normal

SEQ, CHANNELS, EMBED, HIDDEN, LABELS = 8, 4, 8, 16, 5
OUTSIDE = np.uint32(0xFFFFFFFF)  # the layer of what is in no block


def noisy(clean, draws):
    """Clean values mixed with noise, the times of it, and the noise."""
    times, noise = draws
    share = times[:, None, None]
    return (1 - share) * clean + share * noise, times, noise


def draw(keys_of):
    times = jax.vmap(lambda key: jax.random.uniform(key))(keys_of("time"))
    noise = jax.vmap(lambda key: jax.random.normal(key, (SEQ, CHANNELS)))(
        keys_of("noise")
    )
    return times, noise


class Block(nnx.Module):
    """An MLP whose input is scaled and whose output is gated by the condition."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.modulation = normal(rngs, (EMBED, 3, EMBED), "embed", None, None, std=0.1)
        self.update = normal(rngs, (EMBED, EMBED), "embed", None, std=0.1)
        self.up = normal(rngs, (EMBED, HIDDEN), "embed", "mlp")
        self.down = normal(rngs, (HIDDEN, EMBED), "mlp", "embed")

    def __call__(self, stream, scope=None):
        x, cond = stream["x"], stream["cond"]
        modulation = jnp.einsum("BD,DPE->BPE", cond, self.modulation[...])
        scale, shift, gate = (modulation[:, at, None] for at in range(3))
        hidden = (self.norm(x) * (1 + scale) + shift) @ self.up[...]
        x = x + gate * (jax.nn.silu(hidden) @ self.down[...])
        return {"x": x, "cond": cond + jnp.tanh(cond @ self.update[...])}


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.read = normal(rngs, (CHANNELS, EMBED), None, "embed")
        self.labels = normal(rngs, (LABELS, EMBED), None, "embed")
        self.time = normal(rngs, (EMBED,), "embed")
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.write = normal(rngs, (EMBED, CHANNELS), "embed", None)

    def embed(self, batch, scope):
        return self.start(batch, draw(scope.key))

    def start(self, batch, draws):
        mixed, times, _ = noisy(batch["clean"], draws)
        cond = self.labels[...][batch["label"]] + times[:, None] * self.time[...]
        return {"x": mixed @ self.read[...], "cond": cond}

    def head(self, stream, batch, scope):
        return self.errors(stream, draw(scope.key))

    def errors(self, stream, draws):
        error = self.norm(stream["x"]) @ self.write[...] - draws[1]
        return jnp.sum(error**2), jnp.asarray(error.size, jnp.float32)


def loss(whole, batch, step):
    random = jax.random.fold_in(jax.random.key(SEED), np.uint32(0xD0))
    random = jax.random.fold_in(random, step)

    def keys_of(name):
        key = jax.random.fold_in(random, zlib.crc32(name.encode()))
        key = jax.random.fold_in(key, OUTSIDE)
        examples = jnp.arange(len(batch["label"]), dtype=jnp.uint32)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, examples)

    draws = draw(keys_of)
    stream = whole.ends.start(batch, draws)
    for block in whole.blocks:
        stream = block(stream)
    total, weight = whole.ends.errors(stream, draws)
    return total / weight


def batch():
    rng = np.random.default_rng(4)
    clean = rng.normal(size=(8, SEQ, CHANNELS)).astype(np.float32)
    return {"clean": clean, "label": rng.integers(0, LABELS, 8)}


DENOISING = Entry(
    model=lambda layers: from_nnx(
        ends=Ends,
        block=Block,
        num_layers=layers,
        inputs={
            "clean": Input(("batch", "seq", None), shape=(None, None, CHANNELS)),
            "label": Input(("batch",), "int"),
        },
        stream={"x": ("batch", "residual_seq", "embed"), "cond": ("batch", "embed")},
    ),
    ends=Ends,
    groups=lambda layers: {"blocks": (Block, layers)},
    batch=batch,
    loss=loss,
)
