"""Fourier transforms over split dims, as `jnp.fft`, without gathering the array.

A pencil decomposition: an all-to-all makes a split dim whole and splits another one
instead; the dim is transformed, and moved back. GSPMD alone gathers the whole array.

    with jax.set_mesh(mesh):
        y = fft.fftn(x, ("batch", "height", "width"), ("height", "width"), scope)

Values, norms and gradients are those of `jnp.fft`; a device that has n bytes sends

    n (P - 1) / P     for each move over P devices

`moves_of` lists them: two for a split dim, one if `transposed` leaves the frequencies
split as after the last transform. The scope's rules say how dims are split.

Reference: Pekurovsky 2012 (P3DFFT), section 2, on pencils and transposed output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshpar.errors import InputError, whole_number
from meshpar.model.scope import Scope
from meshpar.parallel.grids.pencils import (
    Move,
    Pencils,
    check_real,
    named_dims,
    on_split,
    wide,
)
from meshpar.rules.rules import LogicalAxes

__all__ = ["fftn", "filtered", "ifftn", "irfftn", "moves_of", "rfftn"]


def fftn(
    x: jax.Array,
    logical_axes: LogicalAxes,
    over: Sequence[str],
    scope: Scope,
    *,
    norm: str = "backward",
    transposed: bool = False,
) -> jax.Array:
    """`jnp.fft.fftn` over the dims of some logical axes.

    Args:
        x: Real or complex array; converted to fp32 if its dtype is narrower.
        logical_axes: A name, or None, for each dim of `x`.
        over: Names of the dims to transform.
        scope: Scope whose rules split them; one without rules runs on one device.
        norm: `backward`, `ortho` or `forward`, as for `jnp.fft`.
        transposed: Leave the dims of `over` split as after the last transform, which
            saves moves back; give it to `ifftn` too.

    Returns:
        complex64, shaped as `x`.

    Raises:
        InputError: A dim or norm is unknown, the number of names is not that of dims,
            or no dim divides for a move.
        RuleError: A dim does not divide over the devices that split it.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((4, 8))
        >>> y = fftn(x, ("height", "width"), ("height", "width"), Scope())
        >>> y.shape, float(y[0, 0].real)
        ((4, 8), 32.0)
    """
    plan = Pencils.plan(x.shape, logical_axes, over, scope, norm, transposed)
    return plan.forward(x)


def ifftn(
    y: jax.Array,
    logical_axes: LogicalAxes,
    over: Sequence[str],
    scope: Scope,
    *,
    norm: str = "backward",
    transposed: bool = False,
) -> jax.Array:
    """`jnp.fft.ifftn`: the inverse of `fftn` with the same arguments."""
    plan = Pencils.plan(y.shape, logical_axes, over, scope, norm, transposed)
    return plan.inverse(y)


def rfftn(
    x: jax.Array,
    logical_axes: LogicalAxes,
    over: Sequence[str],
    scope: Scope,
    *,
    modes: int | None = None,
    norm: str = "backward",
    transposed: bool = False,
) -> jax.Array:
    """`jnp.fft.rfftn`: the last dim of `over` has `size // 2 + 1` frequencies.

    Args:
        x: Real array.
        logical_axes: As for `fftn`, and so `scope`.
        over: Names of the dims; the last is transformed first, and is halved.
        scope: Scope whose rules split them.
        modes: Number of lowest frequencies of the last dim to keep; all when None. If
            the dim is split, it must divide over the devices.
        norm: As for `fftn`.
        transposed: As for `fftn`.

    Raises:
        InputError: As for `fftn`; or `modes` is too large or does not divide, or `x` is
            complex.
    """
    check_real(x, "rfftn")
    plan = Pencils.plan(x.shape, logical_axes, over, scope, norm, transposed)
    return plan.real(modes, "rfftn").forward(x)


def irfftn(
    y: jax.Array,
    logical_axes: LogicalAxes,
    over: Sequence[str],
    scope: Scope,
    *,
    size: int,
    norm: str = "backward",
    transposed: bool = False,
) -> jax.Array:
    """`jnp.fft.irfftn`: the inverse of `rfftn`; frequencies not kept are 0.

    Args:
        y: Frequencies.
        logical_axes: As for `rfftn`, and so `over` and `scope`.
        over: Names of the dims.
        scope: Scope whose rules split them.
        size: Size of the last dim of `over` in the result.
        norm: As for `fftn`.
        transposed: As for `fftn`.

    Raises:
        InputError: As for `rfftn`, or more frequencies than a result of that size has.
    """
    size = whole_number("irfftn to size", size)
    last = named_dims(logical_axes, over)[-1]
    shape = tuple(size if dim == last else n for dim, n in enumerate(y.shape))
    plan = Pencils.plan(shape, logical_axes, over, scope, norm, transposed)
    modes = y.shape[last]
    if modes > size // 2 + 1:
        raise InputError(
            f"irfftn to size={size} of {logical_axes[last]!r}: {modes} frequencies are "
            f"given, but that size has {size // 2 + 1}; give size={2 * modes - 2} or "
            f"more, or the lowest {size // 2 + 1} alone",
            key="grid.too_many_frequencies",
        )
    return plan.real(modes, "irfftn").inverse(y)


def filtered(
    x: jax.Array,
    function: Callable[[Any, jax.Array], jax.Array],
    weights: Any,
    logical_axes: LogicalAxes,
    over: Sequence[str],
    scope: Scope,
    *,
    modes: int | None = None,
    norm: str = "backward",
) -> jax.Array:
    """Return `irfftn(function(weights, rfftn(x)))` for a function of each frequency.

    Frequencies stay split as after the last transform, so a split dim takes one
    all-to-all there and one back. Weights are whole on every device; their gradients
    are summed over the mesh axes that split `x`.

    Args:
        x: Real array.
        function: (weights, some of the frequencies) -> as many values; the other dims
            are whole unless the rules split them.
        weights: Tree of arrays; the function gets narrow ones in fp32.
        logical_axes: As for `rfftn`, and so `over` and `scope`.
        over: Names of the dims.
        scope: Scope whose rules split them.
        modes: Number of frequencies of the last dim to keep.
        norm: As for `fftn`.

    Returns:
        Shaped and split as `x`, fp32.

    Raises:
        InputError: As for `rfftn`, or `function` returns another shape.
    """
    check_real(x, "filtered")
    plan = Pencils.plan(x.shape, logical_axes, over, scope, norm, transposed=True)
    plan = plan.real(modes, "filtered")
    leaves, tree = jax.tree.flatten(jax.tree.map(wide, weights))
    steps, _ = plan.steps

    def local(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        given = plan.to_frequencies(x, steps)
        y = function(tree.unflatten(leaves), given)
        if y.shape != given.shape:
            raise InputError(
                f"filtered: the function made {y.shape} of {given.shape} frequencies; "
                "return as many as it is given",
                key="grid.filter_changed_shape",
            )
        return plan.from_frequencies(y, steps)

    splits = (plan.split, *(((),) * leaf.ndim for leaf in leaves))
    return on_split(local, wide(x), *leaves, splits=splits, out_split=plan.split)


def moves_of(
    shape: Sequence[int],
    logical_axes: LogicalAxes,
    over: Sequence[str],
    scope: Scope,
    *,
    transposed: bool = False,
) -> tuple[Move, ...]:
    """Return the all-to-alls of `fftn` in order; `ifftn` undoes them in reverse.

    Args:
        shape: Shape of the array.
        logical_axes: As for `fftn`, and so the other arguments.
        over: Names of the dims.
        scope: Scope whose rules split them.
        transposed: As for `fftn`.
    """
    plan = Pencils.plan(shape, logical_axes, over, scope, "backward", transposed)
    return tuple(step for step in plan.steps[0] if isinstance(step, Move))
