"""Batch statistics: a running mean that a step updates, and Flax's own BatchNorm."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar import Input, from_nnx
from tests.zoo.entry import Entry
from tests.zoo.plain import normal

FEATURES, EMBED, HIDDEN, CLASSES, MOMENTUM = 6, 8, 16, 4, 0.9


class Centred(nnx.Module):
    """An MLP of its input less a running mean, which is state."""

    def __init__(self, rngs):
        self.mean = nnx.BatchStat(jnp.zeros((EMBED,)))
        self.up = normal(rngs, (EMBED, HIDDEN), "embed", "mlp")
        self.down = normal(rngs, (HIDDEN, EMBED), "mlp", "embed")

    def __call__(self, x, scope=None):
        hidden = jax.nn.gelu((x - self.mean[...]) @ self.up[...])
        sums = {"total": jnp.sum(x, axis=0), "count": jnp.float32(len(x))}
        return x + hidden @ self.down[...], sums

    def update_state(self, sums):
        found = sums["total"] / sums["count"]
        self.mean[...] = MOMENTUM * self.mean[...] + (1 - MOMENTUM) * found


class Normed(nnx.Module):
    """An MLP after a BatchNorm."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(EMBED, momentum=MOMENTUM, rngs=rngs)
        self.up = normal(rngs, (EMBED, HIDDEN), "embed", "mlp")
        self.down = normal(rngs, (HIDDEN, EMBED), "mlp", "embed")

    def __call__(self, x, scope=None):
        return x + jax.nn.gelu(self.norm(x) @ self.up[...]) @ self.down[...]


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.read = nnx.Linear(FEATURES, EMBED, rngs=rngs)
        self.write = nnx.Linear(EMBED, CLASSES, rngs=rngs)

    def embed(self, batch, scope=None):
        return self.read(batch["features"])

    def head(self, x, batch, scope=None):
        chosen = jax.nn.one_hot(batch["label"], CLASSES)
        losses = -jnp.sum(jax.nn.log_softmax(self.write(x)) * chosen, axis=-1)
        return jnp.sum(losses), jnp.float32(len(losses))


def loss_of_centred(whole, batch, step):
    x = whole.ends.embed(batch)
    for block in whole.blocks:
        x, sums = block(x)
        block.update_state(jax.lax.stop_gradient(sums))
    total, weight = whole.ends.head(x, batch)
    return total / weight


def batch():
    rng = np.random.default_rng(5)
    features = rng.normal(size=(8, FEATURES)).astype(np.float32) + 0.5
    return {"features": features, "label": rng.integers(0, CLASSES, 8)}


INPUTS = {
    "features": Input(("batch", None), shape=(None, FEATURES)),
    "label": Input(("batch",), "int"),
}

RUNNING_MEAN = Entry(
    model=lambda layers: from_nnx(
        ends=Ends, block=Centred, num_layers=layers, inputs=INPUTS
    ),
    ends=Ends,
    groups=lambda layers: {"blocks": (Centred, layers)},
    batch=batch,
    loss=loss_of_centred,
)

BATCH_NORM = Entry(
    model=lambda layers: from_nnx(
        ends=Ends, block=Normed, num_layers=layers, inputs=INPUTS
    ),
    ends=Ends,
    groups=lambda layers: {"blocks": (Normed, layers)},
    batch=batch,
    microbatches=False,
)
