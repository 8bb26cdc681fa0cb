"""A ViT of `models` beside a plain one, its class token first."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.models.vit import ViTConfig, vit
from tests.zoo.entry import Entry
from tests.zoo.language import EMBED, FFN, HEADS, STD, LayerNormBlock, weighted
from tests.zoo.plain import normal

IMAGE, PATCH, CHANNELS, CLASSES = 6, 2, 2, 10
TOKENS = (IMAGE // PATCH) ** 2 + 1


class Ends(nnx.Module):
    def __init__(self, rngs):
        pixels = PATCH * PATCH * CHANNELS
        self.patch_embed = normal(rngs, (pixels, EMBED), std=STD)
        self.patch_bias = nnx.Param(jnp.zeros((EMBED,)))
        self.class_token = normal(rngs, (EMBED,), std=STD)
        self.position_embed = normal(rngs, (TOKENS, EMBED), std=STD)
        self.final_norm = nnx.LayerNorm(EMBED, epsilon=1e-6, rngs=rngs)
        self.classifier = nnx.Param(jnp.zeros((CLASSES, EMBED)))
        self.classifier_bias = nnx.Param(jnp.zeros((CLASSES,)))

    def embed(self, batch):
        images = batch["images"]
        patches = [
            images[:, row : row + PATCH, column : column + PATCH].reshape(8, -1)
            for row in range(0, IMAGE, PATCH)
            for column in range(0, IMAGE, PATCH)
        ]
        patches = jnp.stack(patches, axis=1)
        x = patches @ self.patch_embed[...] + self.patch_bias[...]
        first = jnp.tile(self.class_token[...], (len(x), 1, 1))
        return jnp.concatenate([first, x], axis=1) + self.position_embed[...]

    def head(self, x, batch):
        pooled = self.final_norm(x[:, 0])
        logits = pooled @ self.classifier[...].T + self.classifier_bias[...]
        return weighted(logits, batch["labels"], batch["weights"])


def batch():
    rng = np.random.default_rng(1)
    return {
        "images": rng.normal(size=(8, IMAGE, IMAGE, CHANNELS)).astype(np.float32),
        "labels": rng.integers(0, CLASSES, 8),
        "weights": np.asarray([1, 1, 0.5, 1, 2, 1, 1, 0], np.float32),
    }


VIT = Entry(
    model=lambda layers: vit(
        ViTConfig(
            layers=layers,
            embed=EMBED,
            heads=HEADS,
            ffn=FFN,
            image=IMAGE,
            patch=PATCH,
            channels=CHANNELS,
            classes=CLASSES,
            init_std=STD,
        )
    ),
    ends=Ends,
    groups=lambda layers: {
        "blocks": (
            lambda rngs: LayerNormBlock(rngs, STD, layers, 1e-6, causal=False),
            layers,
        )
    },
    batch=batch,
)
