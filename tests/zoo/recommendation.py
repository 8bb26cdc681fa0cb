"""A DLRM of `models` with cross layers beside a plain one; rows are inputs."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.models.dlrm import DLRMConfig, dlrm
from tests.zoo.entry import Entry

NUMBERS, FEATURES, DIM, RANK, WIDTH = 3, 3, 8, 8, 16
VECTORS = (FEATURES + 1) * DIM


class Dense(nnx.Module):
    def __init__(self, rngs, *sizes):
        draw = nnx.initializers.glorot_normal()
        self.kernel = nnx.Param(draw(rngs.params(), sizes))
        self.bias = nnx.Param(jnp.zeros(sizes[1:]))

    def __call__(self, x):
        return x @ self.kernel[...] + self.bias[...]


class Cross(nnx.Module):
    def __init__(self, rngs):
        draw = nnx.initializers.glorot_normal()
        self.down = nnx.Param(draw(rngs.params(), (VECTORS, RANK)))
        self.up = Dense(rngs, RANK, VECTORS)

    def __call__(self, stream):
        first, x = stream
        return first, first * self.up(x @ self.down[...]) + x


class Top(nnx.Module):
    def __init__(self, rngs):
        self.dense = Dense(rngs, WIDTH, WIDTH)

    def __call__(self, x):
        return jax.nn.relu(self.dense(x))


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.bottom = nnx.List([Dense(rngs, NUMBERS, 16), Dense(rngs, 16, DIM)])
        self.top = Dense(rngs, VECTORS, WIDTH)
        self.tail = nnx.List([Dense(rngs, WIDTH, 8)])
        self.click = Dense(rngs, 8, 1)


def loss(whole, batch, step):
    ends, x = whole.ends, batch["numbers"]
    for dense in ends.bottom:
        x = jax.nn.relu(dense(x))
    flat = jnp.concatenate([x, batch["embedded"].reshape(len(x), -1)], axis=1)
    stream = flat, flat
    for block in whole.cross:
        stream = block(stream)
    x = jax.nn.relu(ends.top(stream[1]))
    for block in whole.blocks:
        x = block(x)
    for dense in ends.tail:
        x = jax.nn.relu(dense(x))
    odds = jax.nn.sigmoid(ends.click(x)[:, 0])
    right = jnp.where(batch["clicks"] > 0, odds, 1 - odds)
    return -jnp.sum(batch["weights"] * jnp.log(right)) / jnp.sum(batch["weights"])


def batch():
    rng = np.random.default_rng(2)
    return {
        "numbers": rng.normal(size=(8, NUMBERS)).astype(np.float32),
        "embedded": 0.3 * rng.normal(size=(8, FEATURES, DIM)).astype(np.float32),
        "clicks": np.asarray([1, 0, 0, 1, 0, 1, 1, 0], np.float32),
        "weights": np.asarray([1, 1, 0.5, 1, 2, 1, 1, 0], np.float32),
    }


DLRM = Entry(
    model=lambda layers: dlrm(
        DLRMConfig(
            numbers=NUMBERS,
            features=FEATURES,
            dim=DIM,
            bottom=(16, DIM),
            interaction="cross",
            cross_layers=layers // 2,
            cross_rank=RANK,
            top_width=WIDTH,
            top_layers=layers - layers // 2,
            tail=(8,),
        )
    ),
    ends=Ends,
    groups=lambda layers: {
        "cross": (Cross, layers // 2),
        "blocks": (Top, layers - layers // 2),
    },
    batch=batch,
    loss=loss,
)
