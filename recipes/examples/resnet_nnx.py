"""A ResNet in Flax NNX with batch normalisation, for images of 16 x 16."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar
from meshpar import Input

SIZE, WIDTH, CLASSES = 16, 8, 10
optimizer = optax.sgd(0.1, momentum=0.9)


class ResNetBlock(nnx.Module):
    def __init__(self, inputs: int, outputs: int, strides: int, rngs: nnx.Rngs) -> None:
        conv = partial(nnx.Conv, kernel_size=(3, 3), use_bias=False, rngs=rngs)
        self.conv1 = conv(inputs, outputs, strides=(strides, strides))
        self.norm1 = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)
        self.conv2 = conv(outputs, outputs)
        self.norm2 = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)
        self.project = nnx.Conv(
            inputs, outputs, (1, 1), strides=strides, use_bias=False, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return nnx.relu(y + self.project(x))


class ResNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        stem = nnx.Conv(3, WIDTH, kernel_size=(3, 3), use_bias=False, rngs=rngs)
        self.stem, self.norm = stem, nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
        self.block1 = ResNetBlock(WIDTH, WIDTH, 1, rngs)
        self.block2 = ResNetBlock(WIDTH, 2 * WIDTH, 2, rngs)
        self.head = nnx.Linear(2 * WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(x)))
        x = self.block2(self.block1(x))
        return self.head(x.mean(axis=(1, 2)))


def init(key: jax.Array) -> ResNet:
    return ResNet(nnx.Rngs(key))


def loss(resnet: ResNet, batch: dict[str, jax.Array], key: Any) -> tuple:
    logits = resnet(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hits = (logits.argmax(axis=-1) == batch["label"]).sum()
    return losses.sum(), jnp.float32(losses.size), {"accuracy": hits}


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    image = rng.random((16, SIZE, SIZE, 3), np.float32)
    return {"image": image, "label": rng.integers(0, CLASSES, 16)}


BLOCKS = None


def model(blocks: str | None) -> meshpar.Model:
    image = Input(("batch", None, None, None), shape=(None, SIZE, SIZE, 3))
    inputs = {"image": image, "label": Input(("batch",), "int", below=CLASSES)}
    names = {"**/conv*/kernel": (None, None, "embed", "mlp"), "**": None}
    return meshpar.from_loss(init, loss, names=names, inputs=inputs)
