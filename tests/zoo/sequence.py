"""Blocks with a convolution along the sequence and a gated recurrence over it."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from meshpar import from_nnx
from meshpar.models.inputs import LANGUAGE
from tests.zoo.entry import Entry
from tests.zoo.language import VOCAB, batch, weighted
from tests.zoo.plain import normal

EMBED, HIDDEN, WIDTH = 8, 16, 3


class Block(nnx.Module):
    """Causal convolution, then a gated recurrent unit (Cho et al. 2014)."""

    def __init__(self, rngs):
        draw = nnx.initializers.lecun_normal()
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.conv = nnx.Conv(
            EMBED,
            HIDDEN,
            WIDTH,
            padding="CAUSAL",
            kernel_init=nnx.with_partitioning(draw, (None, "embed", "mlp")),
            bias_init=nnx.with_partitioning(nnx.initializers.zeros, ("mlp",)),
            rngs=rngs,
        )
        self.gates = normal(rngs, (HIDDEN, 3, HIDDEN), None, None, "mlp", std=0.2)
        self.recurrent = normal(rngs, (HIDDEN, 3, HIDDEN), None, None, "mlp", std=0.2)
        self.out = normal(rngs, (HIDDEN, EMBED), "mlp", "embed", std=0.2)

    def __call__(self, x, scope=None):
        hidden = jax.nn.silu(self.conv(self.norm(x)))
        given = jnp.einsum("BTF,FGH->TBGH", hidden, self.gates[...])
        recurrent = self.recurrent[...]

        def tick(state, at):
            old = jnp.einsum("BF,FGH->BGH", state, recurrent)
            reset, update = (jax.nn.sigmoid(at[:, g] + old[:, g]) for g in (0, 1))
            new = jnp.tanh(at[:, 2] + reset * old[:, 2])
            state = (1 - update) * new + update * state
            return state, state

        _, states = lax.scan(tick, jnp.zeros((len(x), HIDDEN)), given)
        return x + jnp.einsum("TBF,FD->BTD", states, self.out[...])


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.table = normal(rngs, (VOCAB, EMBED), None, "embed")
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.linear = nnx.Linear(EMBED, VOCAB, rngs=rngs)

    def embed(self, batch, scope=None):
        return self.table[...][batch["tokens"]]

    def head(self, x, batch, scope=None):
        logits = self.linear(self.norm(x))
        return weighted(logits, batch["targets"], batch["weights"])


SEQUENCE = Entry(
    model=lambda layers: from_nnx(
        ends=Ends, block=Block, num_layers=layers, inputs=LANGUAGE
    ),
    ends=Ends,
    groups=lambda layers: {"blocks": (Block, layers)},
    batch=batch,
)
