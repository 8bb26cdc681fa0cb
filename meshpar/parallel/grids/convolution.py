"""Convolutions on split grids, which may be periodic, such as along longitudes.

Each device sends its outermost rows to its neighbours, in a ring along a periodic dim;
other dims are padded with zeros. Written out because GSPMD implements periodic padding
by several permutes of odd widths, and sums a kernel's gradient twice on a mesh with an
idle axis (jax 0.10.2, `tests/test_grid_convolution.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked, sum_dtype
from meshpar.errors import InputError, nearest
from meshpar.model.scope import Scope
from meshpar.parallel.moves import on_split
from meshpar.rules.rules import LogicalAxes, array_split, degree


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
