"""Streams of rank 2 and 4: vectors in plain functions, and a net of convolutions.

The vectors come in a batch whose array is called `example`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar import BlockGroup, Input, Model, Parameter, from_nnx
from tests.zoo.entry import Entry
from tests.zoo.plain import normal

FEATURES, EMBED, HIDDEN, CLASSES, IMAGE = 6, 8, 16, 4, 6


class VectorBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = normal(rngs, (EMBED, HIDDEN))
        self.down = normal(rngs, (HIDDEN, EMBED))

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...]


class VectorEnds(nnx.Module):
    def __init__(self, rngs):
        self.read = normal(rngs, (FEATURES, EMBED))
        self.write = normal(rngs, (EMBED, FEATURES))

    def embed(self, batch):
        return batch["example"] @ self.read[...]

    def head(self, x, batch):
        error = x @ self.write[...] - batch["example"]
        return jnp.sum(error**2), jnp.float32(error.size)


def functions(layers):
    """The vectors' model without any module."""

    def draw(key, shapes):
        # As `nnx.Rngs` derives the keys of its stream, one for each parameter.
        rngs = nnx.Rngs(key)
        return {name: normal(rngs, shape)[...] for name, shape in shapes.items()}, {}

    def declared(shapes, axes, num_layers=None):
        return {
            name: Parameter(
                shape=shape,
                dtype=jnp.float32,
                logical_axes=axes[name],
                num_layers=num_layers,
            )
            for name, shape in shapes.items()
        }

    of_blocks = {"up": (EMBED, HIDDEN), "down": (HIDDEN, EMBED)}
    of_ends = {"read": (FEATURES, EMBED), "write": (EMBED, FEATURES)}
    axes = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    axes |= {"read": (None, "embed"), "write": ("embed", None)}

    def block(params, x, scope):
        hidden = scope.constrain(jnp.tanh(x @ params["up"]), ("batch", "mlp"))
        return x + hidden @ params["down"]

    def head(params, x, batch, scope):
        error = x @ params["write"] - batch["example"]
        return jnp.sum(error**2), jnp.float32(error.size)

    return Model(
        parameters={
            **declared(of_ends, axes),
            "blocks": declared(of_blocks, axes, layers),
        },
        embed=lambda params, batch, scope: batch["example"] @ params["read"],
        groups=(
            BlockGroup(
                name="blocks",
                num_layers=layers,
                block=block,
                stream=("batch", "embed"),
            ),
        ),
        head=head,
        inputs={"example": Input(("batch", None), shape=(None, FEATURES))},
        build={
            "ends": lambda key: draw(key, of_ends),
            "blocks": lambda key: draw(key, of_blocks),
        },
    )


def vectors():
    rng = np.random.default_rng(6)
    return {"example": rng.normal(size=(8, FEATURES)).astype(np.float32)}


def conv(rngs, channels, features, *axes):
    draw = nnx.initializers.lecun_normal()
    return nnx.Conv(
        channels,
        features,
        (3, 3),
        use_bias=False,
        kernel_init=nnx.with_partitioning(draw, (None, None, *axes)),
        rngs=rngs,
    )


class ImageBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = conv(rngs, EMBED, HIDDEN, "embed", "mlp")
        self.down = conv(rngs, HIDDEN, EMBED, "mlp", "embed")

    def __call__(self, x, scope=None):
        return x + self.down(jax.nn.gelu(self.up(x)))


class ImageEnds(nnx.Module):
    def __init__(self, rngs):
        self.read = conv(rngs, 2, EMBED, None, "embed")
        self.write = nnx.Linear(EMBED, CLASSES, rngs=rngs)

    def embed(self, batch, scope=None):
        return self.read(batch["images"])

    def head(self, x, batch, scope=None):
        logits = self.write(jnp.mean(x, axis=(1, 2)))
        chosen = jax.nn.one_hot(batch["labels"], CLASSES)
        losses = -jnp.sum(jax.nn.log_softmax(logits) * chosen, axis=-1)
        return jnp.sum(losses), jnp.float32(len(losses))


def images():
    rng = np.random.default_rng(7)
    pixels = rng.normal(size=(8, IMAGE, IMAGE, 2)).astype(np.float32)
    return {"images": pixels, "labels": rng.integers(0, CLASSES, 8)}


VECTORS = Entry(
    model=functions,
    ends=VectorEnds,
    groups=lambda layers: {"blocks": (VectorBlock, layers)},
    batch=vectors,
)

IMAGES = Entry(
    model=lambda layers: from_nnx(
        ends=ImageEnds,
        block=ImageBlock,
        num_layers=layers,
        inputs={
            "images": Input(("batch", None, None, None), shape=(None, IMAGE, IMAGE, 2)),
            "labels": Input(("batch",), "int"),
        },
    ),
    ends=ImageEnds,
    groups=lambda layers: {"blocks": (ImageBlock, layers)},
    batch=images,
)
