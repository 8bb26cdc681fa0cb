"""An encoder-decoder of `models` beside a plain one, sources of several lengths."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.models.encoder_decoder import EncoderDecoderConfig, encoder_decoder
from tests.zoo.entry import Entry
from tests.zoo.language import (
    EMBED,
    FFN,
    HEAD_DIM,
    HEADS,
    STD,
    VOCAB,
    Attention,
    GatedMLP,
    weighted,
)
from tests.zoo.plain import normal

SOURCE, TARGET = 12, 8


class Cross(nnx.Module):
    def __init__(self, rngs, out_std):
        self.q = normal(rngs, (EMBED, HEADS, HEAD_DIM), std=STD)
        self.kv = normal(rngs, (EMBED, HEADS, 2, HEAD_DIM), std=STD)
        self.out = normal(rngs, (HEADS, HEAD_DIM, EMBED), std=out_std)

    def __call__(self, x, other, seen):
        q = jnp.tensordot(x, self.q[...], 1)
        k, v = (jnp.tensordot(other, self.kv[:, :, at], 1) for at in (0, 1))
        y = jax.nn.dot_product_attention(q, k, v, mask=seen[:, None, None, :])
        return jnp.tensordot(y, self.out[...], 2)


def norm(rngs):
    return nnx.RMSNorm(EMBED, epsilon=1e-6, rngs=rngs)


class Encoder(nnx.Module):
    def __init__(self, rngs, layers):
        std = STD / (2 * layers) ** 0.5
        self.attention_norm = norm(rngs)
        self.attention = Attention(
            rngs, STD, std, kv_heads=HEADS, bias=False, causal=False
        )
        self.mlp_norm = norm(rngs)
        self.mlp = GatedMLP(rngs, STD, std)

    def __call__(self, x, seen):
        x = x + self.attention(self.attention_norm(x), seen)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    def __init__(self, rngs, layers):
        std = STD / (2 * layers) ** 0.5
        self.attention_norm = norm(rngs)
        self.attention = Attention(
            rngs, STD, std, kv_heads=HEADS, bias=False, causal=True
        )
        self.cross_norm = norm(rngs)
        self.cross = Cross(rngs, std)
        self.mlp_norm = norm(rngs)
        self.mlp = GatedMLP(rngs, STD, std)

    def __call__(self, x, encoded, seen):
        x = x + self.attention(self.attention_norm(x))
        x = x + self.cross(self.cross_norm(x), encoded, seen)
        return x + self.mlp(self.mlp_norm(x))


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.token_embed = normal(rngs, (VOCAB, EMBED), std=STD)
        self.source_positions = normal(rngs, (SOURCE, EMBED), std=STD)
        self.target_positions = normal(rngs, (SOURCE, EMBED), std=STD)
        self.encoder_norm = norm(rngs)
        self.decoder_norm = norm(rngs)


def loss(whole, batch, step):
    ends, seen = whole.ends, batch["source_mask"]
    table = ends.token_embed[...]
    encoded = table[batch["source_tokens"]] + ends.source_positions[...]
    for block in whole.encoder:
        encoded = block(encoded, seen)
    encoded = ends.encoder_norm(encoded)
    x = table[batch["target_tokens"]] + ends.target_positions[:TARGET]
    for block in whole.decoder:
        x = block(x, encoded, seen)
    logits = ends.decoder_norm(x) @ table.T
    total, weight = weighted(logits, batch["labels"], batch["weights"])
    return total / weight


def batch():
    rng = np.random.default_rng(2)
    target = rng.integers(0, VOCAB, (8, TARGET + 1))
    return {
        "source_tokens": rng.integers(0, VOCAB, (8, SOURCE)),
        "source_mask": np.arange(SOURCE) < rng.integers(3, SOURCE + 1, (8, 1)),
        "target_tokens": target[:, :-1],
        "labels": target[:, 1:],
        "weights": (rng.random((8, TARGET)) < 0.7).astype(np.float32),
    }


def counts(layers):
    """Layers of the encoder and the decoder."""
    return layers // 2, layers - layers // 2


ENCODER_DECODER = Entry(
    model=lambda layers: encoder_decoder(
        EncoderDecoderConfig(
            encoder_layers=counts(layers)[0],
            decoder_layers=counts(layers)[1],
            embed=EMBED,
            heads=HEADS,
            ffn=FFN,
            vocab=VOCAB,
            max_seq=SOURCE,
            gated=True,
            init_std=STD,
        )
    ),
    ends=Ends,
    groups=lambda layers: {
        "encoder": (lambda rngs: Encoder(rngs, layers), counts(layers)[0]),
        "decoder": (lambda rngs: Decoder(rngs, layers), counts(layers)[1]),
    },
    batch=batch,
    loss=loss,
)
