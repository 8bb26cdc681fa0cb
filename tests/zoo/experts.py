"""Soft experts, all of them computed and split over a logical axis of their own.

Alone, and as the second of two groups after dense blocks.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar import Blocks, from_nnx
from meshpar.models.inputs import LANGUAGE
from tests.zoo.entry import Entry
from tests.zoo.language import VOCAB, batch, weighted
from tests.zoo.plain import normal

EMBED, HIDDEN, EXPERTS, COEFFICIENT = 8, 16, 8, 0.01


class Experts(nnx.Module):
    """Every expert's output, weighted by a softmax; and the router's z-loss."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.gate = normal(rngs, (EMBED, EXPERTS), "embed", "experts")
        self.up = normal(rngs, (EXPERTS, EMBED, HIDDEN), "experts", "embed", None)
        self.down = normal(rngs, (EXPERTS, HIDDEN, EMBED), "experts", None, "embed")

    def __call__(self, x, scope=None):
        normed = self.norm(x)
        logits = normed @ self.gate[...]
        hidden = jnp.einsum("BTD,EDF->BTEF", normed, self.up[...])
        if scope is not None:
            hidden = scope.constrain(hidden, ("batch", "seq", "experts", None))
        shares = jax.nn.softmax(logits, axis=-1)
        mixed = jax.nn.gelu(hidden) * shares[..., None]
        y = jnp.einsum("BTEF,EFD->BTD", mixed, self.down[...])
        z = jax.nn.logsumexp(logits, axis=-1)
        return x + y, {"router_z": jnp.sum(z * z)}


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.up = normal(rngs, (EMBED, HIDDEN), "embed", "mlp")
        self.down = normal(rngs, (HIDDEN, EMBED), "mlp", "embed")

    def __call__(self, x, scope=None):
        return x + jax.nn.gelu(self.norm(x) @ self.up[...]) @ self.down[...]


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.table = normal(rngs, (VOCAB, EMBED), None, "embed")
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)

    def embed(self, batch, scope=None):
        return self.table[...][batch["tokens"]]

    def head(self, x, batch, scope=None):
        logits = self.norm(x) @ self.table[...].T
        return weighted(logits, batch["targets"], batch["weights"])


def loss(whole, batch, step):
    x, auxiliary = whole.ends.embed(batch), 0.0
    for name in whole.names:
        for block in getattr(whole, name):
            x = block(x)
            if isinstance(x, tuple):
                x, sums = x
                auxiliary += COEFFICIENT * sums["router_z"]
    total, weight = whole.ends.head(x, batch)
    return (total + auxiliary) / weight


def dense_and_experts(layers):
    """How many of each."""
    return (layers + 1) // 2, layers // 2


AUXILIARY = {"router_z": COEFFICIENT}

SOFT_EXPERTS = Entry(
    model=lambda layers: from_nnx(
        ends=Ends,
        block=Experts,
        num_layers=layers,
        inputs=LANGUAGE,
        auxiliary=AUXILIARY,
    ),
    ends=Ends,
    groups=lambda layers: {"blocks": (Experts, layers)},
    batch=batch,
    loss=loss,
    rules={"experts": "tensor"},
)

TWO_GROUPS = Entry(
    model=lambda layers: from_nnx(
        ends=Ends,
        groups={
            "dense": Blocks(block=Dense, num_layers=dense_and_experts(layers)[0]),
            "experts": Blocks(
                block=Experts,
                num_layers=dense_and_experts(layers)[1],
                auxiliary=AUXILIARY,
            ),
        },
        inputs=LANGUAGE,
    ),
    ends=Ends,
    groups=lambda layers: {
        "dense": (Dense, dense_and_experts(layers)[0]),
        "experts": (Experts, dense_and_experts(layers)[1]),
    },
    batch=batch,
    loss=loss,
    rules={"experts": "tensor"},
)
