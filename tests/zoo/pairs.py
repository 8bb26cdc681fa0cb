"""A model of pairs of `models`, beside a plain one that makes all scores at once."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.models.pair import PairConfig, pair
from tests.zoo.entry import Entry, one_group
from tests.zoo.language import weighted
from tests.zoo.plain import normal

EMBED, RESIDUES, HEADS, HEAD_DIM, HIDDEN, FFN = 8, 16, 2, 4, 8, 16
VOCAB, BINS, REACH, STD, EPSILON = 6, 5, 3, 0.25, 1e-5


def layer_norm(size, rngs):
    return nnx.LayerNorm(size, epsilon=EPSILON, rngs=rngs)


class Product(nnx.Module):
    def __init__(self, rngs, out_std, subscripts):
        self.subscripts = subscripts
        self.norm = layer_norm(EMBED, rngs)
        self.sides = normal(rngs, (EMBED, 4, HIDDEN), std=STD)
        opened = np.repeat([[0.0], [0.0], [1.0], [1.0]], HIDDEN, axis=1)
        self.sides_bias = nnx.Param(jnp.asarray(opened, jnp.float32))
        self.product_norm = layer_norm(HIDDEN, rngs)
        self.out = normal(rngs, (HIDDEN, EMBED), std=out_std)
        self.gate = normal(rngs, (EMBED, EMBED), std=STD)
        self.gate_bias = nnx.Param(jnp.ones((EMBED,)))

    def __call__(self, z):
        z = self.norm(z)
        left, right, left_gate, right_gate = (
            z @ self.sides[...][:, side] + self.sides_bias[...][side]
            for side in range(4)
        )
        left, right = (
            left * jax.nn.sigmoid(left_gate),
            right * jax.nn.sigmoid(right_gate),
        )
        product = jnp.einsum(self.subscripts, left, right)
        gate = jax.nn.sigmoid(z @ self.gate[...] + self.gate_bias[...])
        return gate * (self.product_norm(product) @ self.out[...])


class Attention(nnx.Module):
    """Around the starting node; of the pairs turned, around the ending one."""

    def __init__(self, rngs, out_std, *, turned):
        self.turned = turned
        self.norm = layer_norm(EMBED, rngs)
        self.qkvg = normal(rngs, (EMBED, 4, HEADS, HEAD_DIM), std=STD)
        self.gate_bias = nnx.Param(jnp.ones((HEADS, HEAD_DIM)))
        self.bias = normal(rngs, (EMBED, HEADS), std=STD)
        self.out = normal(rngs, (HEADS, HEAD_DIM, EMBED), std=out_std)

    def __call__(self, z):
        z = z.swapaxes(1, 2) if self.turned else z
        z = self.norm(z)
        q, k, v, gate = jnp.moveaxis(jnp.tensordot(z, self.qkvg[...], 1), 3, 0)
        scores = jnp.einsum("bijhd,bikhd->bihjk", q, k) / HEAD_DIM**0.5
        scores = scores + jnp.einsum("bjkd,dh->bhjk", z, self.bias[...])[:, None]
        mixed = jnp.einsum("bihjk,bikhd->bijhd", jax.nn.softmax(scores), v)
        mixed = jax.nn.sigmoid(gate + self.gate_bias[...]) * mixed
        out = jnp.tensordot(mixed, self.out[...], 2)
        return out.swapaxes(1, 2) if self.turned else out


class Transition(nnx.Module):
    def __init__(self, rngs, out_std):
        self.norm = layer_norm(EMBED, rngs)
        self.up = normal(rngs, (EMBED, FFN), std=STD)
        self.up_bias = nnx.Param(jnp.zeros((FFN,)))
        self.down = normal(rngs, (FFN, EMBED), std=out_std)

    def __call__(self, z):
        hidden = self.norm(z) @ self.up[...] + self.up_bias[...]
        return jnp.maximum(hidden, 0) @ self.down[...]


class Block(nnx.Module):
    def __init__(self, rngs, layers):
        std = STD / (2 * layers) ** 0.5
        self.outgoing = Product(rngs, std, "bikc,bjkc->bijc")
        self.incoming = Product(rngs, std, "bkic,bkjc->bijc")
        self.starting = Attention(rngs, std, turned=False)
        self.ending = Attention(rngs, std, turned=True)
        self.transition = Transition(rngs, std)

    def __call__(self, z):
        z = z + self.outgoing(z)
        z = z + self.incoming(z)
        z = z + self.starting(z)
        z = z + self.ending(z)
        return z + self.transition(z)


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.left = normal(rngs, (VOCAB, EMBED), std=STD)
        self.right = normal(rngs, (VOCAB, EMBED), std=STD)
        self.offsets = normal(rngs, (2 * REACH + 1, EMBED), std=STD)
        self.final_norm = layer_norm(EMBED, rngs)
        self.distogram = normal(rngs, (EMBED, BINS), std=STD)
        self.distogram_bias = nnx.Param(jnp.zeros((BINS,)))

    def embed(self, batch):
        left = self.left[...][batch["tokens"]]
        right = self.right[...][batch["tokens"]]
        places = np.arange(RESIDUES)
        apart = np.clip(places[:, None] - places, -REACH, REACH) + REACH
        return left[:, :, None] + right[:, None] + self.offsets[...][apart]

    def head(self, z, batch):
        logits = self.final_norm(z) @ self.distogram[...] + self.distogram_bias[...]
        return weighted(logits, batch["distances"], batch["weights"])


def batch():
    rng = np.random.default_rng(3)
    pairs = (8, RESIDUES, RESIDUES)
    return {
        "tokens": rng.integers(0, VOCAB, pairs[:2]),
        "distances": rng.integers(0, BINS, pairs),
        "weights": (rng.random(pairs) < 0.7).astype(np.float32),
    }


def entry(**rules):
    """Under rules of its own."""
    return Entry(
        model=lambda layers: pair(
            PairConfig(
                layers=layers,
                embed=EMBED,
                residues=RESIDUES,
                heads=HEADS,
                head_dim=HEAD_DIM,
                channels=HIDDEN,
                ffn=FFN,
                vocab=VOCAB,
                bins=BINS,
                reach=REACH,
                init_std=STD,
            )
        ),
        ends=Ends,
        groups=one_group(Block),
        batch=batch,
        rules=rules,
    )


BOTH = entry()
WHOLE = entry(pair_rows=None, pair_columns=None)
ROWS_OVER_TWO = entry(pair_rows=("context", "tensor"), pair_columns=None)
