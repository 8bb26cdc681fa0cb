"""Convolutions and norms of volumes (batch, depth, height, width, channels).

Each is written of whole volumes. Where rules split a dim of space, GSPMD sends halos of
half a kernel's width between neighbours and adds up what sums over space.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Float

from meshpar import Scope
from meshpar.models.layers.attention import normal
from meshpar.models.layers.recomputed import recomputed
from meshpar.parallel.grids.convolution import (
    input_gradient,
    kernel_gradient,
    own_convolution,
    split_by_hand,
)
from meshpar.parallel.tensor import AnyArray
from meshpar.rules.rules import Split

VOLUME = ("batch", "depth", "height", "width", None)
"""Logical axes of an array of voxels and channels."""

_DIMS = ("NDHWC", "DHWIO", "NDHWC")


class Conv(nnx.Module):
    """A convolution of cubes, its result as large as its input over `stride`.

    Args:
        channels: Of its input and of its result.
        kernel: Voxels of a side, an odd number, or `stride`.
        stride: Voxels of the input that one of the result stands for, along a side.
        logical_axis: Of the result's channels, for stored parameters.
        rngs: He-normal first weights come from it.
    """

    def __init__(
        self,
        channels: tuple[int, int],
        *,
        kernel: int = 3,
        stride: int = 1,
        logical_axis: str | None = "embed",
        rngs: nnx.Rngs,
    ) -> None:
        self.stride = stride
        self.kernel = _kernel(channels, kernel, logical_axis, rngs)
        self.bias = _vector(0.0, channels[1], logical_axis)

    def __call__(
        self, x: Float[AnyArray, "batch depth height width inner"], scope: Scope
    ) -> Float[AnyArray, "batch fewer_deep fewer_high fewer_wide outer"]:
        """-> the sides over `stride`; sends halos of `kernel // 2` voxels."""
        kernel = self.kernel[...].astype(x.dtype)
        by_hand = split_by_hand(scope, VOLUME, x, kernel, self.stride)
        y = _convolved(x, kernel, self.stride, by_hand)
        return scope.constrain(y + self.bias[...].astype(y.dtype), VOLUME)


class Upsample(nnx.Module):
    """A transposed convolution: every voxel becomes a cube of voxels.

    Cubes do not overlap, so it is a matmul: of a transposed convolution GSPMD gathers
    the whole volume.

    Args:
        channels: Of its input and of its result.
        factor: Voxels of a cube's side.
        logical_axis: Of the result's channels, for stored parameters.
        rngs: He-normal first weights come from it.
    """

    def __init__(
        self,
        channels: tuple[int, int],
        *,
        factor: int = 2,
        logical_axis: str | None = "embed",
        rngs: nnx.Rngs,
    ) -> None:
        self.kernel = _kernel(channels, factor, logical_axis, rngs)
        self.bias = _vector(0.0, channels[1], logical_axis)

    def __call__(
        self, x: Float[AnyArray, "batch depth height width inner"], scope: Scope
    ) -> Float[AnyArray, "batch more_deep more_high more_wide outer"]:
        """-> sides of `factor` times as many voxels; sends nothing."""
        kernel = self.kernel[...].astype(x.dtype)
        cubes = jnp.einsum("ndhwc,ijkco->ndihjwko", x, kernel)
        batch, *sides = x.shape[:-1]
        factor, *_, outer = kernel.shape
        y = cubes.reshape(batch, *(factor * side for side in sides), outer)
        return scope.constrain(y + self.bias[...].astype(y.dtype), VOLUME)


class GroupNorm(nnx.Module):
    """Group normalization: per example and channel group, over space (Wu and He 2018).

    Args:
        channels: Of its input.
        groups: That they are cut into; their greatest common divisor at most.
        epsilon: Added to the variance.
    """

    def __init__(self, channels: int, *, groups: int, epsilon: float) -> None:
        self.groups, self.epsilon = math.gcd(groups, channels), epsilon
        self.scale = _vector(1.0, channels, "embed")
        self.bias = _vector(0.0, channels, "embed")

    def __call__(
        self, x: Float[AnyArray, "batch *space channels"]
    ) -> Float[AnyArray, "batch *space channels"]:
        """Where space is split, two all-reduces of batch x groups fp32 values."""
        norm = recomputed(_group_norm, self.groups, self.epsilon)
        return norm(x, self.scale[...], self.bias[...])


class BatchNorm(nnx.Module):
    """Batch normalization: per channel, over the batch and space.

    Running means stand in for a batch's while nothing is trained.

    Args:
        channels: Of its input.
        epsilon: Added to the variance.
        rngs: Unused by its first values.
    """

    def __init__(self, channels: int, *, epsilon: float, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(channels, momentum=0.9, epsilon=epsilon, rngs=rngs)

    def __call__(
        self, x: Float[AnyArray, "batch *space channels"], training: bool
    ) -> Float[AnyArray, "batch *space channels"]:
        """One all-reduce of two means of each channel over what splits the batch."""
        return self.norm(x, use_running_average=not training).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolved(
    x: jax.Array, kernel: jax.Array, stride: int, by_hand: Split | None
) -> jax.Array:
    return _plain(x, kernel, stride)


def _plain(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    strides = (stride,) * 3
    with own_convolution():
        return lax.conv_general_dilated(
            x, kernel, strides, "SAME", dimension_numbers=_DIMS
        )


def _convolved_forward(
    x: jax.Array, kernel: jax.Array, stride: int, by_hand: Split | None
) -> Any:
    return _plain(x, kernel, stride), (x, kernel)


def _convolved_backward(
    stride: int, by_hand: Split | None, kept: Any, dy: jax.Array
) -> Any:
    """The kernel's gradient before the input's, in this order.

    Both copy what they convolve, halos around it. Left to itself XLA keeps such copies
    from the forward, and puts the kernels' gradients off, of which each keeps a `dy`.
    """
    (x, kernel), dy = lax.optimization_barrier((kept, dy))
    of_kernel = _kernel_gradient(x, dy, kernel, stride, by_hand)
    of_kernel, dy = lax.optimization_barrier((of_kernel, dy))
    return _input_gradient(x, dy, kernel, stride, by_hand), of_kernel


def _kernel_gradient(
    x: jax.Array, dy: jax.Array, kernel: jax.Array, stride: int, by_hand: Split | None
) -> jax.Array:
    if by_hand is not None:
        return kernel_gradient(x, dy, kernel, stride, by_hand)
    return jax.linear_transpose(lambda one: _plain(x, one, stride), kernel)(dy)[0]


def _input_gradient(
    x: jax.Array, dy: jax.Array, kernel: jax.Array, stride: int, by_hand: Split | None
) -> jax.Array:
    if by_hand is not None:
        return input_gradient(x, dy, kernel, stride, by_hand)
    return jax.linear_transpose(lambda one: _plain(one, kernel, stride), x)(dy)[0]


_convolved.defvjp(_convolved_forward, _convolved_backward)


def _group_norm(
    groups: int, epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> jax.Array:
    values = x.astype(jnp.float32)
    values = values - _group_means(values, groups)
    variance = _group_means(values * values, groups)
    normed = values * lax.rsqrt(variance + epsilon)
    scaled = normed * scale.astype(jnp.float32)
    return (scaled + bias.astype(jnp.float32)).astype(x.dtype)


def _group_means(x: jax.Array, groups: int) -> jax.Array:
    """(batch, *space, channels) -> (batch, 1..., channels), alike in each group.

    Space is summed over as it lies; channels are regrouped once it is gone.
    """
    batch, channels = x.shape[0], x.shape[-1]
    of_channels = jnp.mean(x, axis=tuple(range(1, x.ndim - 1)))
    means = jnp.mean(of_channels.reshape(batch, groups, -1), axis=-1)
    alike = jnp.repeat(means, channels // groups, axis=-1)
    return alike.reshape(batch, *(1,) * (x.ndim - 2), channels)


def _kernel(
    channels: tuple[int, int],
    size: int,
    logical_axis: str | None,
    rngs: nnx.Rngs,
) -> nnx.Param:
    shape, std = (size, size, size, *channels), math.sqrt(2 / (size**3 * channels[0]))
    return normal(shape, std, (None, None, None, None, logical_axis), rngs=rngs)


def _vector(value: float, size: int, logical_axis: str | None) -> nnx.Param:
    return nnx.Param(jnp.full((size,), value), out_sharding=(logical_axis,))
