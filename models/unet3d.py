"""A 3-D U-Net (Ronneberger et al. 2015; Çiçek et al. 2016) of residual blocks.

Every level has a group of blocks of its own: what flows between them is the volume at
hand, and the finer ones that wait to be joined again. The volume is whole in the code
and may be split along `depth`, `height` and `width`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar import Blocks, Input, InputError, Model, Scope, from_nnx
from meshpar.model.inputs import Batch
from meshpar.models.family import Family
from meshpar.models.field_types import check_field_types, check_least_zero, check_sizes
from meshpar.models.layers.volume import VOLUME, BatchNorm, Conv, GroupNorm, Upsample
from meshpar.parallel.tensor import cross_entropy

_SIZES = (
    "depth",
    "height",
    "width",
    "channels",
    "classes",
    "levels",
    "blocks",
    "base",
    "patch",
)
_NORMS = ("group", "batch")

Volumes = tuple[jax.Array, ...]
"""The volume at hand, and the finer ones above it, the finest first."""


@dataclass(frozen=True, kw_only=True)
class UNet3DConfig:
    """Shape of a 3-D U-Net.

    Args:
        depth: Voxels of a volume along each dim, and so the next two.
        height: Of it.
        width: Of it.
        classes: Of a voxel.
        channels: Of a voxel of the input.
        levels: Resolutions, each half as fine as the one above.
        base: Channels of the finest; each level below has twice as many.
        most: Channels that no level exceeds; no limit when 0.
        patch: Side of the cubes of voxels that the finest level reads, and in the end
            names, as one place each.
        blocks: Residual blocks at each level, on the way down and on the way up.
        norm: `group`, of each example, or `batch`, of all together.
        groups: Channel groups of the group norm; of a level whose channels they do not
            divide, the greatest common divisor of both. Unused by `norm=batch`.
        instances: Whether the head also gives, of every voxel that has not class 0, how
            far from it the middle of its object is.
        offset_weight: What a voxel of distance counts in the loss beside a nat; unused
            without `instances`.
        norm_epsilon: Added to the variance.

    Raises:
        InputError: A size that is no whole number or below 1, another value of the
            wrong type, no such norm, or sides that the levels do not halve evenly.
    """

    depth: int
    height: int
    width: int
    classes: int
    channels: int = 1
    levels: int = 4
    base: int = 32
    most: int = 320
    patch: int = 1
    blocks: int = 1
    norm: str = "group"
    groups: int = 8
    instances: bool = False
    offset_weight: float = 0.1
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        check_field_types(self)
        check_sizes(self, *_SIZES, "groups")
        check_least_zero(self, most="no limit")
        if self.norm not in _NORMS:
            raise InputError(
                f"norm={self.norm!r}: must be one of {', '.join(_NORMS)}",
                key="model.unknown_norm",
            )
        for name in ("depth", "height", "width"):
            size = getattr(self, name)
            if size % self.shrinks:
                padded = -(-size // self.shrinks) * self.shrinks
                raise InputError(
                    f"{name}={size} is not a multiple of {self.shrinks}, by which "
                    f"levels={self.levels}{self._patch_name} shrink it; pad volumes to "
                    f"{padded}, with weight 0 there, or take fewer levels",
                    key="model.volume_indivisible",
                )

    @property
    def shrinks(self) -> int:
        """Voxels along a side that one of the coarsest level stands for."""
        return self.patch * 2 ** (self.levels - 1)

    @property
    def _patch_name(self) -> str:
        return f" and patch={self.patch}" if self.patch > 1 else ""

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level, the finest first."""
        limit = self.most or self.base * self.shrinks
        return tuple(min(self.base * 2**at, limit) for at in range(self.levels))

    @property
    def layers(self) -> int:
        """Blocks of all levels."""
        return self.blocks * (2 * self.levels - 1)

    @property
    def outputs(self) -> int:
        """Values that the head gives of a voxel."""
        return self.classes + 3 * self.instances

    @property
    def inputs(self) -> dict[str, Input]:
        """Volumes, the class of each voxel and, if given, how much each counts."""
        space = (None, self.depth, self.height, self.width)
        voxels = VOLUME[:-1]
        found = {
            "images": Input((*voxels, "channels"), shape=(*space, self.channels)),
            "labels": Input(voxels, "int", shape=space, below=self.classes),
            "weights": Input(voxels, shape=space, optional=True, is_weight=True),
        }
        if self.instances:
            found["offsets"] = Input((*voxels, None), shape=(*space, 3))
        return found


class UNetBlock(nnx.Module):
    """Two convolutions, each with its norm, added to what they are given.

    Args:
        config: Of the U-Net.
        channels: Of its level.
        rngs: First weights come from it.
    """

    def __init__(self, config: UNet3DConfig, channels: int, rngs: nnx.Rngs) -> None:
        both = (channels, channels)
        self.first, self.second = Conv(both, rngs=rngs), Conv(both, rngs=rngs)
        self.first_norm = _norm(config, channels, rngs)
        self.second_norm = _norm(config, channels, rngs)

    def __call__(self, stream: Volumes, scope: Scope) -> Volumes:
        """The volume at hand changes, the finer ones wait."""
        x, *finer = stream
        hidden = jax.nn.relu(self._normed(self.first_norm, self.first(x, scope), scope))
        change = self._normed(self.second_norm, self.second(hidden, scope), scope)
        return (scope.constrain(jax.nn.relu(x + change), VOLUME), *finer)

    def _normed(
        self, norm: GroupNorm | BatchNorm, x: jax.Array, scope: Scope
    ) -> jax.Array:
        return norm(x, scope.training) if isinstance(norm, BatchNorm) else norm(x)


class UNetEnds(nnx.Module):
    """Input, resampling and output layers: volumes in, a class per voxel out.

    Args:
        config: Of the U-Net.
        rngs: First weights come from it.
    """

    def __init__(self, config: UNet3DConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        widths = config.widths
        pairs = list(zip(widths[:-1], widths[1:], strict=True))
        patch = config.patch
        self.read = Conv(
            (config.channels, widths[0]),
            kernel=3 if patch == 1 else patch,
            stride=patch,
            rngs=rngs,
        )
        self.down = _by_level(
            Conv(pair, kernel=2, stride=2, rngs=rngs) for pair in pairs
        )
        self.up = _by_level(Upsample(pair[::-1], rngs=rngs) for pair in pairs)
        self.join = _by_level(Conv((2 * fine, fine), rngs=rngs) for fine, _ in pairs)
        # Few values of a voxel: no device has but a part of them.
        self.write: Conv | Upsample = (
            Conv((widths[0], config.outputs), kernel=1, logical_axis=None, rngs=rngs)
            if patch == 1
            else Upsample(
                (widths[0], config.outputs),
                factor=patch,
                logical_axis=None,
                rngs=rngs,
            )
        )

    def embed(self, batch: Batch, scope: Scope) -> Volumes:
        """Images -> the finest level's volume, and no finer one."""
        images = batch["images"].astype(self.read.kernel[...].dtype)
        return (self.read(scope.constrain(images, VOLUME), scope),)

    def descend(self, stream: Volumes, scope: Scope) -> Volumes:
        """To the next coarser level; the volume at hand waits."""
        x, *finer = stream
        return (self.down[_name(len(finer))](x, scope), *finer, x)

    def ascend(self, stream: Volumes, scope: Scope) -> Volumes:
        """Back to the next finer level, joined with what waited there."""
        x, *finer, waited = stream
        level = _name(len(finer))
        both = jnp.concatenate([waited, self.up[level](x, scope)], axis=-1)
        return (self.join[level](scope.constrain(both, VOLUME), scope), *finer)

    def logits(self, stream: Volumes, scope: Scope) -> jax.Array | dict[str, jax.Array]:
        """fp32 (batch, depth, height, width, classes); with `instances` a dict.

        It has these as `classes`, and as `offsets` voxels along each dim from a voxel
        to the middle of its object.
        """
        values = self.write(stream[0], scope).astype(jnp.float32)
        values = scope.constrain(values, VOLUME)
        if not self.config.instances:
            return values
        classes = self.config.classes
        return {"classes": values[..., :classes], "offsets": values[..., classes:]}

    def head(
        self, stream: Volumes, batch: Batch, scope: Scope
    ) -> tuple[jax.Array, jax.Array]:
        """Summed loss and summed weights of the voxels."""
        labels, found = batch["labels"], self.logits(stream, scope)
        weights = batch.get("weights", jnp.ones(labels.shape, jnp.float32))
        if not isinstance(found, dict):
            return cross_entropy(found, labels, weights, scope)
        loss, weight = cross_entropy(found["classes"], labels, weights, scope)
        distance = jnp.sum(jnp.abs(found["offsets"] - batch["offsets"]), axis=-1)
        of_objects = jnp.sum(jnp.where(labels > 0, distance * weights, 0.0))
        return loss + self.config.offset_weight * of_objects, weight


def unet3d(config: UNet3DConfig) -> Model:
    """The model of a config, under meshpar's contract."""
    levels = range(config.levels)
    down = {f"down{level}": _level(config, level, "descend") for level in levels}
    up = {f"up{level}": _level(config, level, "ascend") for level in levels[-2::-1]}
    return from_nnx(
        ends=lambda rngs: UNetEnds(config, rngs),
        groups={**down, **up},
        inputs=config.inputs,
    )


def _level(config: UNet3DConfig, level: int, enter: str) -> Blocks:
    first = level == 0 and enter == "descend"
    return Blocks(
        block=lambda rngs: UNetBlock(config, config.widths[level], rngs),
        num_layers=config.blocks,
        enter=None if first else enter,
        stream=(VOLUME,) * (level + 1),
    )


def _by_level(modules: Iterable[nnx.Module]) -> nnx.Dict:
    return nnx.Dict({_name(level): module for level, module in enumerate(modules)})


def _name(level: int) -> str:
    return f"level{level}"


def _norm(config: UNet3DConfig, channels: int, rngs: nnx.Rngs) -> GroupNorm | BatchNorm:
    epsilon = config.norm_epsilon
    if config.norm == "batch":
        return BatchNorm(channels, epsilon=epsilon, rngs=rngs)
    return GroupNorm(channels, groups=config.groups, epsilon=epsilon)


UNET3D = Family(
    config=UNet3DConfig,
    build=unet3d,
    presets={
        "tiny-unet3d": UNet3DConfig(
            depth=16, height=16, width=16, classes=3, levels=2, base=8
        ),
        "unet3d-512": UNet3DConfig(depth=512, height=512, width=512, classes=4, base=8),
    },
    fuzzed=(
        "--preset tiny-unet3d --model depth=8,height=8,width=4,base=4,groups=2,"
        "instances=true",
        "--preset tiny-unet3d --model depth=12,height=4,width=4,base=4,groups=2,"
        "blocks=2",
        "--preset tiny-unet3d --model depth=8,height=12,width=4,base=4,groups=2 "
        "--with-rules depth=context,height=tensor",
    ),
)
"""The larger one is of whole scans, its levels 8 to 64 channels wide."""
