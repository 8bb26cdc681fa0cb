"""Convolutions on split grids, which may be periodic, and their gradients.

Each device sends its outermost rows to its neighbours, in a ring along a periodic dim;
other dims are padded with zeros. Written out because GSPMD implements periodic padding
by several permutes of odd widths, and sums a kernel's gradient twice on a mesh with an
idle axis (jax 0.10.2, `tests/test_grid_convolution.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked, sum_dtype
from meshpar.errors import InputError, nearest
from meshpar.model.scope import Scope
from meshpar.parallel.grids.pencils import on_split
from meshpar.rules.rules import LogicalAxes, Split, array_split, degree
from meshpar.rules.spatial import short_dim


def grid_convolution(
    x: jax.Array,
    kernel: jax.Array,
    logical_axes: LogicalAxes,
    periodic: Sequence[str],
    scope: Scope,
) -> jax.Array:
    """Apply a convolution of stride 1 that keeps the sizes of the grid.

    Two permutes for each split dim, of half a window times the rest of this device's
    part, and as many in the backward; the kernel's gradient is summed over the mesh
    axes that split the grid.

    Args:
        x: (batch, *grid, channels).
        kernel: (*window, channels, features), whose window is odd in each dim.
        logical_axes: Names of the dims of `x`; its channels are whole.
        periodic: Names of the periodic dims.
        scope: Scope whose rules split the grid.

    Returns:
        (batch, *grid, features), split as `x`.

    Raises:
        InputError: A window is even or longer than a device's part; the kernel has
            other dims or channels; channels are split; a periodic dim is unknown.
        RuleError: A dim does not divide over the devices that split it.
    """
    split = array_split(scope.rules, logical_axes, x.shape)
    window = kernel.shape[:-2]
    _check_kernel(logical_axes, x.shape, kernel.shape, split[-1])
    _check_periodic(logical_axes, periodic)
    for dim, size in enumerate(window, start=1):
        if size % 2 == 0:
            raise InputError(
                f"a window of {size} along {logical_axes[dim]!r}: give an odd one, "
                "which has a middle",
                key="grid.even_window",
            )
        check_reach(logical_axes[dim], size, x.shape[dim] // degree(split[dim]))
    closed = {logical_axes.index(name) for name in periodic}

    def local(x: jax.Array, kernel: jax.Array) -> jax.Array:
        for dim, size in enumerate(window, start=1):
            halo = size // 2, size // 2
            x = with_halo(x, dim, halo, split[dim], closes=dim in closed)
        letters = "DHW"[-len(window) :]
        layout = f"N{letters}C", f"{letters}IO", f"N{letters}C"
        kernel = kernel.astype(x.dtype)
        return lax.conv_general_dilated(
            x, kernel, (1,) * len(window), "VALID", dimension_numbers=layout
        )

    # Its gradient is summed over devices in this dtype.
    kernel = kernel.astype(sum_dtype(kernel.dtype, scope.platform))
    whole = ((),) * kernel.ndim
    return on_split(local, x, kernel, splits=(split, whole), out_split=split)


def _check_kernel(
    logical_axes: LogicalAxes,
    shape: tuple[int, ...],
    kernel: tuple[int, ...],
    split_channels: tuple[str, ...],
) -> None:
    grid = len(shape) - 2
    if not 1 <= grid <= 3 or len(kernel) != grid + 2:
        raise InputError(
            f"a kernel of shape {kernel} over an array of shape {shape}: give "
            "(*window, channels, features), with a window over each of 1 to 3 dims",
            key="grid.wrong_kernel_dims",
        )
    if kernel[-2] != shape[-1]:
        raise InputError(
            f"a kernel of {kernel[-2]} channels, shape {kernel}, over an array of "
            f"{shape[-1]}, shape {shape}; give them as many",
            key="grid.wrong_kernel_channels",
        )
    if split_channels:
        raise InputError(
            f"the channels, {logical_axes[-1]!r} of size {shape[-1]}, are split over "
            f"{'/'.join(split_channels)}, but a convolution sums them on each device; "
            "name them None in the logical axes, or map them to None in the rules",
            key="grid.split_channels",
        )


def _check_periodic(logical_axes: LogicalAxes, periodic: Sequence[str]) -> None:
    grid = [name for name in logical_axes[1:-1] if name is not None]
    if isinstance(periodic, str):
        raise InputError(
            f"periodic={periodic!r}: give a tuple, ({periodic!r},)",
            key="grid.periodic_not_a_tuple",
        )
    for name in periodic:
        if name not in grid:
            raise InputError(
                f"periodic names {name!r}, but the dims of the grid are "
                f"{tuple(logical_axes[1:-1])}; {nearest(str(name), grid)}",
                key="grid.unknown_periodic_dim",
            )


def check_reach(name: str | None, window: int, part: int) -> None:
    """Check that a window does not reach beyond a device's neighbours along a dim.

    Raises:
        InputError: Half of the window is longer than a device's part.
    """
    if window // 2 > part:
        raise InputError(
            f"a window of {window} along {name!r} reaches {window // 2} places, but a "
            f"device has {part}: split {name!r} over fewer devices",
            key="grid.window_beyond_part",
        )


def with_halo(
    x: jax.Array,
    dim: int,
    halo: tuple[int, int],
    mesh_axes: tuple[str, ...],
    *,
    closes: bool = False,
) -> jax.Array:
    """Extend a device's part by its neighbours along a dim: two permutes at most.

    Args:
        x: This device's part, inside a `shard_map` manual over `mesh_axes`.
        dim: The dim that grows.
        halo: Numbers of places to add before and after it.
        mesh_axes: Mesh axes that split the dim; none for a whole one.
        closes: True for a periodic dim; otherwise zeros are added at its ends.
    """
    before, after = halo
    first = lax.slice_in_dim(x, 0, after, axis=dim)
    last = lax.slice_in_dim(x, x.shape[dim] - before, x.shape[dim], axis=dim)
    if mesh_axes:
        n = lax.axis_size(mesh_axes)
        onward = [(rank, (rank + 1) % n) for rank in range(n if closes else n - 1)]
        with asked("grid_halo"):
            # Devices without a sender receive zeros, as needed at the ends.
            if before:
                last = lax.ppermute(last, mesh_axes, onward)
            if after:
                back = [(target, source) for source, target in onward]
                first = lax.ppermute(first, mesh_axes, back)
    elif not closes:
        first, last = jnp.zeros_like(first), jnp.zeros_like(last)
    return jnp.concatenate([last, x, first], axis=dim) if before or after else x


# GSPMD gets three gradients wrong without an error (jax 0.10.2, `tests/test_space.py`):
#
# 1. a kernel's, on a mesh with an axis of GSPMD that splits neither the input nor the
#    result (an idle axis): too large by the size of that axis;
# 2. an input's, if examples are split over manual mesh axes and two dims of space over
#    others, and a window reaches over a device's whole part along exactly one of the
#    two: twice too large;
# 3. a kernel's, if the input is whole and the result is split along two dims of space,
#    and a window reaches over the whole part of the result along exactly one of the
#    two: twice too large.
#
# In the second case gradients through a U-Net's norms are halved too, so those programs
# are refused, and so are those of the third.

OWN_SCOPE = "meshpar-convolution"
"""Name that `own_convolution` gives to operations, for the audit."""

_DIMS = ("NDHWC", "DHWIO", "NDHWC")


def own_convolution() -> AbstractContextManager:
    """Mark convolutions made inside as having correct gradients.

    A step refuses other convolutions over split space (`meshpar.audit.hazards`).
    """
    return jax.named_scope(OWN_SCOPE)


def split_by_hand(
    scope: Scope,
    logical_axes: LogicalAxes,
    x: jax.Array,
    kernel: jax.Array,
    stride: int,
) -> Split | None:
    """Return the split of a convolution's input if GSPMD's gradients may be wrong.

    That is with an idle mesh axis, or if a device's part is smaller than a window of
    several places. None otherwise.

    Args:
        scope: Scope whose rules split the input.
        logical_axes: Names of the input's dims.
        x: (batch, depth, height, width, channels).
        kernel: (*window, channels, features).
        stride: Stride along each dim.

    Raises:
        InputError: In such a case, a window reaches over a device's whole part, or the
            stride does not divide that part; or the program has the second or third
            fault above, or the first with a whole input.
    """
    split = array_split(scope.rules, logical_axes, x.shape)
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
    """Check that a stride divides a device's part of the input."""
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
    """Refuse a split result of a whole input if the kernel's gradient is wrong."""
    result = (shape[0], *(-(-size // stride) for size in shape[1:4]), shape[4])
    split = array_split(scope.rules, logical_axes, result)
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
        f"on each device, but its result has {result[dim]}, split over "
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
    """Refuse a short part of one of two split dims, with split examples."""
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
    """Return the gradient of the kernel of a 3-D convolution padded as `SAME`.

    Two permutes at most for each split dim, and one fp32 all-reduce of the kernel over
    the mesh axes that split the input.

    Args:
        x: (batch, depth, height, width, channels), the convolution's input.
        dy: (batch, *sides over `stride`, features), its result's gradient.
        kernel: (*window, channels, features), for its shape and dtype.
        stride: Stride along each dim; it divides the sides of a device's part.
        split: Split of `x` and `dy`.
    """
    pads = _pads(x.shape, kernel.shape, stride)
    shape = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
    used = tuple(dict.fromkeys(axis for axes in split for axis in axes))

    def local(x: jax.Array, dy: jax.Array) -> jax.Array:
        x = _with_halos(x, pads, split)
        transposed = jax.linear_transpose(lambda one: _valid(x, one, stride), shape)
        (gradient,) = transposed(dy)
        with asked("kernel_gradient"):
            return lax.psum(gradient.astype(jnp.float32), used)

    whole = ((),) * kernel.ndim
    gradient = on_split(local, x, dy, splits=(split, split), out_split=whole)
    return gradient.astype(kernel.dtype)


def input_gradient(
    x: jax.Array, dy: jax.Array, kernel: jax.Array, stride: int, split: Split
) -> jax.Array:
    """Return the gradient of the input; gradients of halos go back to their owners.

    Args:
        x: The input, for its shape and dtype.
        dy: As for `kernel_gradient`, and so the other arguments.
        kernel: The kernel, whole on each device.
        stride: Stride along each dim.
        split: Split of `x` and `dy`.
    """
    pads = _pads(x.shape, kernel.shape, stride)
    shape = [size // degree(axes) for size, axes in zip(x.shape, split, strict=True)]
    part = jax.ShapeDtypeStruct(tuple(shape), x.dtype)

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
