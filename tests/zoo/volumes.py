"""A 3-D U-Net of `models` beside a plain one, its convolutions channels first."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.models.unet3d import UNet3DConfig, unet3d
from tests.zoo.entry import Entry
from tests.zoo.language import weighted

CONFIG = UNet3DConfig(
    depth=8,
    height=8,
    width=4,
    classes=3,
    channels=2,
    levels=2,
    base=4,
    groups=2,
    instances=True,
)
EXAMPLES = 8


def conv(x, kernel, bias, stride=1, pad=1):
    """(batch, channels, depth, height, width), padded on both sides of each dim."""
    kernel = jnp.transpose(kernel, (4, 3, 0, 1, 2))
    y = jax.lax.conv_general_dilated(x, kernel, (stride,) * 3, [(pad, pad)] * 3)
    return y + bias[:, None, None, None]


class Conv(nnx.Module):
    def __init__(self, rngs, inner, outer, size=3):
        std = np.sqrt(2 / (size**3 * inner))
        shape = (size, size, size, inner, outer)
        self.kernel = nnx.Param(nnx.initializers.normal(std)(rngs.params(), shape))
        self.bias = nnx.Param(jnp.zeros(outer))

    def __call__(self, x, stride=1, pad=1):
        return conv(x, self.kernel[...], self.bias[...], stride, pad)


class Up(Conv):
    def __call__(self, x):
        """JAX's own, which mirrors what it is given."""
        mirrored = self.kernel[...][::-1, ::-1, ::-1]
        dims = ("NCDHW", "DHWIO", "NCDHW")
        y = jax.lax.conv_transpose(
            x, mirrored, (2, 2, 2), "VALID", dimension_numbers=dims
        )
        return y + self.bias[...][:, None, None, None]


class GroupNorm(nnx.Module):
    def __init__(self, rngs, channels):
        self.scale = nnx.Param(jnp.ones(channels))
        self.bias = nnx.Param(jnp.zeros(channels))

    def __call__(self, x):
        cut = x.reshape(len(x), CONFIG.groups, -1)
        cut = cut - jnp.mean(cut, axis=2, keepdims=True)
        cut = cut / jnp.sqrt(jnp.mean(cut**2, axis=2, keepdims=True) + 1e-5)
        scale, bias = self.scale[...], self.bias[...]
        return (
            cut.reshape(x.shape) * scale[:, None, None, None]
            + bias[:, None, None, None]
        )


class BatchNorm(nnx.Module):
    def __init__(self, rngs, channels):
        self.norm = nnx.BatchNorm(channels, momentum=0.9, epsilon=1e-5, rngs=rngs)

    def __call__(self, x):
        return jnp.moveaxis(self.norm(jnp.moveaxis(x, 1, -1)), -1, 1)


class Block(nnx.Module):
    def __init__(self, rngs, channels, norm):
        self.first, self.second = (Conv(rngs, channels, channels) for _ in range(2))
        self.first_norm, self.second_norm = (norm(rngs, channels) for _ in range(2))

    def __call__(self, x):
        hidden = jax.nn.relu(self.first_norm(self.first(x)))
        return jax.nn.relu(x + self.second_norm(self.second(hidden)))


class Ends(nnx.Module):
    def __init__(self, rngs, patch=1):
        fine, deep = CONFIG.widths
        self.patch = patch
        self.read = Conv(rngs, CONFIG.channels, fine, 3 if patch == 1 else patch)
        self.down = nnx.Dict(level0=Conv(rngs, fine, deep, 2))
        self.up = nnx.Dict(level0=Up(rngs, deep, fine, 2))
        self.join = nnx.Dict(level0=Conv(rngs, 2 * fine, fine))
        kind = Conv if patch == 1 else Up
        self.write = kind(rngs, fine, CONFIG.classes + 3, patch)

    def enter(self, x):
        return self.read(x) if self.patch == 1 else self.read(x, self.patch, 0)

    def head(self, x, batch):
        values = self.write(x, pad=0) if self.patch == 1 else self.write(x)
        values = jnp.moveaxis(values, 1, -1)
        labels, weights = batch["labels"], batch["weights"]
        loss, weight = weighted(values[..., :3], labels, weights)
        far = jnp.sum(jnp.abs(values[..., 3:] - batch["offsets"]), axis=-1)
        return loss + 0.1 * jnp.sum(far * weights * (labels != 0)), weight


def loss(whole, batch, step):
    """Down, across and up again."""
    ends, x = whole.ends, jnp.moveaxis(batch["images"], -1, 1)
    x = ends.enter(x)
    for block in whole.down0:
        x = block(x)
    fine, x = x, ends.down["level0"](x, stride=2, pad=0)
    for block in whole.down1:
        x = block(x)
    x = ends.join["level0"](jnp.concatenate([fine, ends.up["level0"](x)], axis=1))
    for block in whole.up0:
        x = block(x)
    total, weight = ends.head(x, batch)
    return total / weight


def batch():
    rng = np.random.default_rng(1)
    space = (EXAMPLES, CONFIG.depth, CONFIG.height, CONFIG.width)
    return {
        "images": rng.normal(size=(*space, CONFIG.channels)).astype(np.float32),
        "labels": rng.integers(0, CONFIG.classes, space),
        "weights": rng.random(space).astype(np.float32),
        "offsets": rng.normal(size=(*space, 3)).astype(np.float32),
    }


def entry(name, norm, patch=1, **rules):
    """With such norms, under rules of its own."""
    config = dataclasses.replace(CONFIG, norm=name, patch=patch)
    fine, deep = config.widths

    def blocks(channels):
        return lambda rngs: Block(rngs, channels, norm)

    return Entry(
        model=lambda layers: unet3d(dataclasses.replace(config, blocks=layers)),
        ends=functools.partial(Ends, patch=patch),
        groups=lambda layers: {
            "down0": (blocks(fine), layers),
            "down1": (blocks(deep), layers),
            "up0": (blocks(fine), layers),
        },
        batch=batch,
        loss=loss,
        rules=rules,
        tensor=4,
        microbatches=name == "group",
    )


SLABS = entry("group", GroupNorm)
BEAMS = entry("group", GroupNorm, depth="context", height="tensor")
IDLE = entry("group", GroupNorm, depth="context")
"""Whose `tensor` splits nothing."""

CROSSED = entry("group", GroupNorm, depth="tensor", width="context")
"""Whose coarser level has one place of width on a device."""

PATCHED = entry("group", GroupNorm, patch=2, depth="context", height="tensor")

BATCH_NORMED = entry("batch", BatchNorm, depth="context", height="tensor")
