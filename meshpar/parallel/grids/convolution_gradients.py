"""The gradients of a convolution over split space, by halos sent by hand.

GSPMD gets three of them wrong without a word (jax 0.10.2, `tests/test_space.py`):

- a kernel's, on a mesh with an axis left to it that splits nothing of the input and of
  the result (an idle one): too large by that axis' size;
- an input's, where the examples are split over manual mesh axes and two dims of space
  over others, and a window reaches over the whole part of a device along one of the two
  alone: twice too large;
- a kernel's, where an input is whole whose result is split along two dims of space, and
  a window reaches over the whole part of the result along one of the two alone: twice
  too large.

Where the second strikes, what goes back through a U-Net's norms is halved as well, so
that those programs are refused, as are those of the third.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked
from meshpar.errors import InputError
from meshpar.model.scope import Scope
from meshpar.parallel.grids.convolution import check_reach, with_halo
from meshpar.parallel.moves import Split, degree, on_split, split_of
from meshpar.rules.rules import LogicalAxes
from meshpar.rules.spatial import short_dim

OWN_SCOPE = "meshpar-convolution"
"""Names what `own_convolution` marks, for the audit."""

_DIMS = ("NDHWC", "DHWIO", "NDHWC")


def own_convolution() -> AbstractContextManager:
    """Marks convolutions made inside as those whose gradients are taken care of.

    A step refuses others over split space (`meshpar.audit.hazards`).
    """
    return jax.named_scope(OWN_SCOPE)


def split_by_hand(
    scope: Scope,
    logical_axes: LogicalAxes,
    x: jax.Array,
    kernel: jax.Array,
    stride: int,
) -> Split | None:
    """How a convolution's input lies, where GSPMD's gradients may be wrong; else None.

    That is beside an idle mesh axis, and where a device's part is smaller than a window
    of several places.

    Args:
        scope: Whose rules split the input.
        logical_axes: Of the input.
        x: (batch, depth, height, width, channels).
        kernel: (*window, channels, features).
        stride: Along each dim.

    Raises:
        InputError: There, a window reaches over the whole part of a device, or a stride
            does not divide that part; or it reaches as far as that part of one of two
            split dims, beside split examples; or the result is split, its input whole,
            and an axis idle or a window as long as a part of one of two split dims.
    """
    split = split_of(scope, logical_axes, x.shape)
    parts = [size // degree(axes) for size, axes in zip(x.shape, split, strict=True)]
    dims = [dim for dim in (1, 2, 3) if split[dim]]
    if not dims:
        _check_result(scope, logical_axes, x.shape, kernel.shape, stride)
        return None
    if scope.batch_axes and len(dims) > 1:
        _check_parts(logical_axes, x.shape, parts, kernel.shape, dims)
    small = any(parts[dim] < kernel.shape[dim - 1] > 1 for dim in dims)
    if not (small or scope.idle_axes(logical_axes, x.shape)):
        return None
    for dim in dims:
        name, size = logical_axes[dim], x.shape[dim]
        check_reach(name, kernel.shape[dim - 1], parts[dim])
        _check_stride(name, size, parts[dim], stride)
    return split


def _check_stride(name: str | None, size: int, part: int, stride: int) -> None:
    """Refuses parts of the input that are not whole parts of the result."""
    if part % stride:
        even = stride * (size // part)
        raise InputError(
            f"{name!r} has {size} places at a convolution of stride {stride}, and a "
            f"device {part} of them, which are no whole number of strides: pad "
            f"{name!r} to {-(-size // even) * even} places, or map it to None in the "
            "rules",
            key="grid.indivisible_by_stride",
        )


def _check_result(
    scope: Scope,
    logical_axes: LogicalAxes,
    shape: tuple[int, ...],
    window: tuple[int, ...],
    stride: int,
) -> None:
    """Refuses a split result of a whole input where XLA counts its kernel's twice."""
    result = (shape[0], *(-(-size // stride) for size in shape[1:4]), shape[4])
    split = split_of(scope, logical_axes, result)
    parts = [size // degree(axes) for size, axes in zip(result, split, strict=True)]
    dims = [dim for dim in (1, 2, 3) if split[dim]]
    idle = scope.idle_axes(logical_axes, result)
    short = short_dim(parts[1:], window, [dim - 1 for dim in dims])
    if not dims or not (idle or short is not None):
        return
    dim = dims[0] if short is None else short + 1
    beside = f"beside {'/'.join(idle)}, which splits neither"
    if not idle:
        beside = f"{parts[dim]} on a device, as far as its window reaches"
    name, even = logical_axes[dim], stride * degree(split[dim])
    raise InputError(
        f"{name!r} has {shape[dim]} places at a convolution of stride {stride}, whole "
        f"on each device, but its result {result[dim]}, split over "
        f"{'/'.join(split[dim])}: {beside}, XLA gets the kernel's gradient wrong (jax "
        f"0.10.2); pad {name!r} to {-(-shape[dim] // even) * even} places, or map it "
        "to None in the rules",
        key="grid.strided_result_split_alone",
    )


def _check_parts(
    logical_axes: LogicalAxes,
    shape: tuple[int, ...],
    parts: list[int],
    kernel: tuple[int, ...],
    dims: list[int],
) -> None:
    """Refuses what comes out wrong even so: what goes back into it is halved."""
    short = short_dim(parts[1:], kernel, [dim - 1 for dim in dims])
    if short is None:
        return
    dim = short + 1
    others = [
        repr(logical_axes[dim]) for dim in dims if parts[dim] > kernel[dim - 1] // 2
    ]
    raise InputError(
        f"{logical_axes[dim]!r} has {shape[dim]} places at a convolution with a window "
        f"of {kernel[dim - 1]}, and a device {parts[dim]} of them: beside split "
        f"examples and longer parts of {' and '.join(others)} XLA gets gradients wrong "
        f"there (jax 0.10.2); split {logical_axes[dim]!r} over fewer devices, take "
        "larger volumes or fewer levels, or leave the examples whole",
        key="grid.short_part_beside_examples",
    )


def kernel_gradient(
    x: jax.Array, dy: jax.Array, kernel: jax.Array, stride: int, split: Split
) -> jax.Array:
    """The gradient of the kernel of a 3-D convolution padded as `SAME`.

    Two permutes at most for each split dim, and one fp32 all-reduce of the kernel over
    the mesh axes that split the input.

    Args:
        x: (batch, depth, height, width, channels), the convolution's input.
        dy: (batch, *sides over `stride`, features), its result's gradient.
        kernel: (*window, channels, features), for its shape and dtype.
        stride: Along each dim; it divides the sides of a device's part.
        split: How `x` and `dy` lie.
    """
    pads = _pads(x.shape, kernel.shape, stride)
    shape = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
    used = tuple(dict.fromkeys(axis for axes in split for axis in axes))

    def local(x: jax.Array, dy: jax.Array) -> jax.Array:
        x = _with_halos(x, pads, split)
        transposed = jax.linear_transpose(lambda one: _valid(x, one, stride), shape)
        (found,) = transposed(dy)
        with asked("kernel_gradient"):
            return lax.psum(found.astype(jnp.float32), used)

    whole = ((),) * kernel.ndim
    found = on_split(local, x, dy, splits=(split, split), out_split=whole)
    return found.astype(kernel.dtype)


def input_gradient(
    x: jax.Array, dy: jax.Array, kernel: jax.Array, stride: int, split: Split
) -> jax.Array:
    """The gradient of its input: the halos' gradients go back to their owners.

    Args:
        x: As for `kernel_gradient`, for its shape and dtype, and so what follows.
        dy: Its result's gradient.
        kernel: Whole on each device.
        stride: Along each dim.
        split: How `x` and `dy` lie.
    """
    pads = _pads(x.shape, kernel.shape, stride)
    here = [size // degree(axes) for size, axes in zip(x.shape, split, strict=True)]
    part = jax.ShapeDtypeStruct(tuple(here), x.dtype)

    def local(dy: jax.Array, kernel: jax.Array) -> jax.Array:
        def convolved(x: jax.Array) -> jax.Array:
            return _valid(_with_halos(x, pads, split), kernel, stride)

        return jax.linear_transpose(convolved, part)(dy)[0]

    whole = ((),) * kernel.ndim
    return on_split(local, dy, kernel, splits=(split, whole), out_split=split)


def _valid(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    strides = (stride,) * 3
    with own_convolution():
        return lax.conv_general_dilated(
            x, kernel, strides, "VALID", dimension_numbers=_DIMS
        )


def _pads(
    shape: tuple[int, ...], kernel: tuple[int, ...], stride: int
) -> list[tuple[int, int]]:
    return lax.padtype_to_pads(shape[1:4], kernel[:3], (stride,) * 3, "SAME")


def _with_halos(x: jax.Array, pads: list[tuple[int, int]], split: Split) -> jax.Array:
    for dim, pad in enumerate(pads, start=1):
        x = with_halo(x, dim, pad, split[dim])
    return x
