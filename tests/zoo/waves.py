"""A linear recurrence with complex parameters (Orvieto et al. 2023)."""

import jax.numpy as jnp
from flax import nnx

from meshpar import from_nnx
from meshpar.models.inputs import LANGUAGE
from tests.zoo.entry import Entry
from tests.zoo.language import SEQ, batch
from tests.zoo.plain import normal
from tests.zoo.sequence import EMBED, Ends

HIDDEN = 16


def wave(rngs, shape, *axes):
    draw = nnx.initializers.normal(0.3, jnp.complex64)
    return nnx.Param(draw(rngs.params(), shape), out_sharding=axes)


class Block(nnx.Module):
    """`y = Re(C h)`, `h_t = exp(-exp(decay) + i angle) h_(t-1) + B x_t`."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.read = wave(rngs, (EMBED, HIDDEN), "embed", "mlp")
        self.rates = wave(rngs, (HIDDEN,), "mlp")
        self.write = wave(rngs, (HIDDEN, EMBED), "mlp", "embed")
        self.skip = normal(rngs, (EMBED,), "embed")

    def __call__(self, x, scope=None):
        normed, rates = self.norm(x), self.rates[...]
        given = normed.astype(jnp.complex64) @ self.read[...]
        exponent = -jnp.exp(rates.real) + 1j * rates.imag
        steps = jnp.arange(SEQ)
        past = steps[:, None] - steps
        powers = jnp.exp(exponent * jnp.maximum(past, 0)[..., None])
        kernel = jnp.where((past >= 0)[..., None], powers, 0)
        states = jnp.einsum("TSF,BSF->BTF", kernel, given)
        return x + (states @ self.write[...]).real + self.skip[...] * normed


WAVES = Entry(
    model=lambda layers: from_nnx(
        ends=Ends, block=Block, num_layers=layers, inputs=LANGUAGE
    ),
    ends=Ends,
    groups=lambda layers: {"blocks": (Block, layers)},
    batch=batch,
)
