"""Convolutions on grids that close in themselves, such as longitudes round the Earth.

Each device sends its outermost rows to its neighbours, in a ring along a periodic dim;
beyond the ends of another dim are zeros. Written out because GSPMD makes several
permutes of odd widths of a periodic padding, and sums up a kernel's gradient twice on a
mesh with an idle axis (jax 0.10.2, `tests/test_grid_convolution.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked, sum_dtype
from meshpar.errors import InputError, nearest
from meshpar.model.scope import Scope
from meshpar.parallel.moves import degree, on_split, split_of
from meshpar.rules.rules import LogicalAxes


def grid_convolution(
    x: jax.Array,
    kernel: jax.Array,
    logical_axes: LogicalAxes,
    periodic: Sequence[str],
    scope: Scope,
) -> jax.Array:
    """A convolution of stride 1 that keeps the grid's sizes.

    Two permutes for each split dim, of half a window times the rest of this device's
    part, and as many in the backward; the kernel's gradient is summed over the mesh
    axes that split the grid.

    Args:
        x: (batch, *grid, channels).
        kernel: (*window, channels, features), whose window is odd in each dim.
        logical_axes: Of `x`; its channels are whole.
        periodic: Those of the grid's dims that close in themselves.
        scope: Whose rules split the grid.

    Returns:
        (batch, *grid, features), split as `x`.

    Raises:
        InputError: A window that is even, or longer than a device's part reaches; a
            kernel of other dims or channels, split channels, or no such dim.
        RuleError: A dim does not divide over the devices that split it.
    """
    split = split_of(scope, logical_axes, x.shape)
    window = kernel.shape[:-2]
    _check_kernel(logical_axes, x.shape, kernel.shape, split[-1])
    _check_periodic(logical_axes, periodic)
    for dim, size in enumerate(window, start=1):
        _check(logical_axes[dim], size, x.shape[dim] // degree(split[dim]))
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

    # In which the region's end sums up its gradient.
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


def _check(name: str | None, size: int, part: int) -> None:
    if size % 2 == 0:
        raise InputError(
            f"a window of {size} along {name!r}: give an odd one, which has a middle",
            key="grid.even_window",
        )
    check_reach(name, size, part)


def check_reach(name: str | None, window: int, part: int) -> None:
    """Refuses a window that reaches over a device's whole part of a dim.

    Raises:
        InputError: It does.
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
    """A device's part with the places next to it along a dim: two permutes at most.

    Args:
        x: Its part, inside a `shard_map` that is manual over `mesh_axes`.
        dim: Along which it grows.
        halo: Places before it and after it.
        mesh_axes: What splits the dim; none for a whole one.
        closes: Whether the last part is next to the first; else zeros lie beyond both.
    """
    before, after = halo
    first = lax.slice_in_dim(x, 0, after, axis=dim)
    last = lax.slice_in_dim(x, x.shape[dim] - before, x.shape[dim], axis=dim)
    if mesh_axes:
        n = lax.axis_size(mesh_axes)
        onward = [(rank, (rank + 1) % n) for rank in range(n if closes else n - 1)]
        with asked("grid_halo"):
            # Where nobody sends, zeros arrive: those beyond the end.
            if before:
                last = lax.ppermute(last, mesh_axes, onward)
            if after:
                back = [(to, of) for of, to in onward]
                first = lax.ppermute(first, mesh_axes, back)
    elif not closes:
        first, last = jnp.zeros_like(first), jnp.zeros_like(last)
    return jnp.concatenate([last, x, first], axis=dim) if before or after else x
