"""Fourier transforms over dims that devices share out: `jnp.fft`, without a gather.

A pencil decomposition: a split dim is made whole by an all-to-all that splits another
one instead, transformed, and moved back. GSPMD alone gathers the array on every device.

    with jax.set_mesh(mesh):
        y = fft.fftn(x, ("batch", "height", "width"), ("height", "width"), scope)

Values, norms and gradients are those of `jnp.fft`; a device that has n bytes sends

    n (P - 1) / P     for each move over P devices

`moves_of` lists them: two for a split dim, one where `transposed` leaves the
frequencies as the last transform has them. Dims are split as the scope's rules say.

Reference: Pekurovsky 2012 (P3DFFT), section 2, on pencils and transposed output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import InputError, nearest
from meshpar.model.scope import Scope
from meshpar.parallel.moves import Move, Split, degree, on_split, split_of
from meshpar.rules.rules import LogicalAxes

__all__ = ["fftn", "filtered", "ifftn", "irfftn", "moves_of", "rfftn"]

NORMS = ("backward", "ortho", "forward")

Steps = tuple[Move | int, ...]
"""What is done in order: moves, and dims to transform."""


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
        x: Real or complex; in fp32 where its values are narrower.
        logical_axes: A name, or None, for each dim of `x`.
        over: Those of the dims to transform.
        scope: Whose rules split them; one without rules runs on one device.
        norm: `backward`, `ortho` or `forward`, as of `jnp.fft`.
        transposed: Leave the dims of `over` split as the last transform has them,
            which saves moves back; give it to `ifftn` too.

    Returns:
        complex64, shaped as `x`.

    Raises:
        InputError: No such dim or norm, or none can take a split while it is moved.
        RuleError: A dim does not divide over the devices that split it.

    Example:
        >>> x = jnp.ones((4, 8))
        >>> y = fftn(x, ("height", "width"), ("height", "width"), Scope())
        >>> y.shape, float(y[0, 0].real)
        ((4, 8), 32.0)
    """
    plan = _Plan.of(x.shape, logical_axes, over, scope, norm, transposed)
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
    """`jnp.fft.ifftn`: undoes `fftn` of the same arguments, moves included."""
    plan = _Plan.of(y.shape, logical_axes, over, scope, norm, transposed)
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
    """`jnp.fft.rfftn`: of the last dim of `over` those frequencies that are not twice.

    Args:
        x: Real.
        logical_axes: As for `fftn`, and so what follows.
        over: The dims; the last is transformed first, and is the one that is halved.
        scope: Whose rules split them.
        modes: So many of its lowest frequencies are kept; all `size // 2 + 1` when
            None. Where it is split they divide over its devices.
        norm: As for `fftn`.
        transposed: As for `fftn`.

    Raises:
        InputError: Also where the frequencies kept do not divide, or are more than
            there are.
    """
    plan = _Plan.of(x.shape, logical_axes, over, scope, norm, transposed)
    return plan.real(modes).forward(x)


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
    """`jnp.fft.irfftn`: undoes `rfftn`; frequencies that were not kept count as 0.

    Args:
        y: Frequencies.
        logical_axes: As for `rfftn`, and so what follows.
        over: The dims.
        scope: Whose rules split them.
        size: Of the last dim of `over` in the result.
        norm: As for `fftn`.
        transposed: As for `fftn`.
    """
    dims = _dims_of(logical_axes, over)
    shape = tuple(size if dim == dims[-1] else n for dim, n in enumerate(y.shape))
    plan = _Plan.of(shape, logical_axes, over, scope, norm, transposed)
    return plan.real(y.shape[dims[-1]]).inverse(y)


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
    """`irfftn(function(weights, rfftn(x)))`, each frequency by itself.

    The frequencies are transformed back from where the last transform has them, so that
    a split dim takes one all-to-all there and one back. Weights are whole on every
    device; their gradients are summed over the mesh axes that split `x`.

    Args:
        x: Real.
        function: (weights, some of the frequencies) -> alike; the other dims are whole
            unless the rules split them.
        weights: Tree of arrays; the function gets narrow ones in fp32.
        logical_axes: As for `rfftn`, and so what follows.
        over: The dims.
        scope: Whose rules split them.
        modes: Frequencies of the last dim that are kept.
        norm: As for `fftn`.

    Returns:
        Shaped and split as `x`, fp32.
    """
    plan = _Plan.of(x.shape, logical_axes, over, scope, norm, transposed=True)
    plan = plan.real(modes)
    leaves, tree = jax.tree.flatten(jax.tree.map(_wide, weights))
    steps, _ = plan.steps

    def local(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        y = function(tree.unflatten(leaves), plan.to_frequencies(x, steps))
        return plan.from_frequencies(y, steps)

    splits = (plan.split, *(((),) * leaf.ndim for leaf in leaves))
    return on_split(local, _wide(x), *leaves, splits=splits, out_split=plan.split)


def moves_of(
    shape: Sequence[int],
    logical_axes: LogicalAxes,
    over: Sequence[str],
    scope: Scope,
    *,
    transposed: bool = False,
) -> tuple[Move, ...]:
    """The all-to-alls of `fftn` in order; those of `ifftn` are as many, undone.

    Args:
        shape: Of the array.
        logical_axes: As for `fftn`, and so what follows.
        over: The dims.
        scope: Whose rules split them.
        transposed: As for `fftn`.
    """
    plan = _Plan.of(shape, logical_axes, over, scope, "backward", transposed)
    return tuple(step for step in plan.steps[0] if isinstance(step, Move))


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """One transform: what is moved and transformed in which order.

    Args:
        shape: Of the array before it.
        logical_axes: Of its dims.
        split: How it lies.
        dims: Those transformed.
        norm: As of `jnp.fft`.
        transposed: Whether the last moves are left out.
        modes: Frequencies of the last of `dims` after a real transform; None for a
            complex one.
    """

    shape: tuple[int, ...]
    logical_axes: LogicalAxes
    split: Split
    dims: tuple[int, ...]
    norm: str
    transposed: bool
    modes: int | None = None

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        logical_axes: LogicalAxes,
        over: Sequence[str],
        scope: Scope,
        norm: str,
        transposed: bool,
    ) -> _Plan:
        if norm not in NORMS:
            raise InputError(f"norm={norm!r}: must be one of {', '.join(NORMS)}")
        return cls(
            shape=tuple(shape),
            logical_axes=tuple(logical_axes),
            split=split_of(scope, logical_axes, shape),
            dims=_dims_of(logical_axes, over),
            norm=norm,
            transposed=transposed,
        )

    def real(self, modes: int | None) -> _Plan:
        """The plan of a real transform that keeps so many frequencies."""
        name, size = self.logical_axes[self.dims[-1]], self.shape[self.dims[-1]]
        there = size // 2 + 1
        modes = there if modes is None else modes
        if not 1 <= modes <= there:
            raise InputError(
                f"{modes} frequencies (modes) of {name!r} of size {size}: a real "
                f"transform has 1 to {there}; give other modes, or another size"
            )
        mesh_axes = self.split[self.dims[-1]]
        devices = degree(mesh_axes)
        if modes % devices:
            below = modes - modes % devices or devices
            fewer = f"give modes={below}, " if below <= there else "give "
            raise InputError(
                f"{name!r} of size {size} has {modes} frequencies in a real transform, "
                f"which do not divide over {'/'.join(mesh_axes)} of size {devices}; "
                f"{fewer}another last dim, or take fftn"
            )
        return replace(self, modes=modes)

    def forward(self, x: jax.Array) -> jax.Array:
        """Frequencies of an array."""
        steps, split = self.steps

        def local(x: jax.Array) -> jax.Array:
            return self.to_frequencies(x, steps)

        return on_split(local, _wide(x), splits=(self.split,), out_split=split)

    def inverse(self, y: jax.Array) -> jax.Array:
        """The array of frequencies."""
        steps, split = self.steps

        def local(y: jax.Array) -> jax.Array:
            return self.from_frequencies(y, steps)

        return on_split(local, _wide(y), splits=(split,), out_split=self.split)

    def to_frequencies(self, x: jax.Array, steps: Steps) -> jax.Array:
        """Of this device's part, by the plan's steps."""
        for step in steps:
            x = step(x, "fft") if isinstance(step, Move) else self._to(x, step)
        return x

    def from_frequencies(self, y: jax.Array, steps: Steps) -> jax.Array:
        """Undoes `to_frequencies`."""
        for step in reversed(steps):
            if isinstance(step, Move):
                y = step.undone(y, "fft")
                continue
            y = self._from(y, step)
        return y

    @property
    def steps(self) -> tuple[Steps, Split]:
        """Moves, and dims to transform, in order; and how the result is split."""
        steps: list[Move | int] = []
        out: list[Move] = []  # those not undone yet, last one first to be
        split = self.split

        def take_back(whole: tuple[int, ...]) -> None:
            """Undoes moves until none is left that splits some dims."""
            nonlocal split
            while any(move.target in whole for move in out):
                steps.append(out.pop().undone)
                split = steps[-1].after(split)  # type: ignore[union-attr]

        for dim in reversed(self.dims):
            take_back((dim,))
            if split[dim]:
                out.append(self._move(dim, split))
                steps.append(out[-1])
                split = out[-1].after(split)
            steps.append(dim)
        kept = self.dims if self.transposed else ()
        take_back(tuple(dim for dim in range(len(self.shape)) if dim not in kept))
        return tuple(steps), split

    def _move(self, dim: int, split: Split) -> Move:
        """Of what splits a dim, to the first dim that can take it.

        Those of the transform come first, those whole among them foremost.
        """
        others = [other for other in reversed(range(len(split))) if other != dim]
        others.sort(key=lambda other: (other not in self.dims, bool(split[other])))
        sizes = self._sizes_at(dim)
        for other in others:
            if sizes[other] % degree(split[other] + split[dim]) == 0:
                return Move(mesh_axes=split[dim], source=dim, target=other)
        held = ", ".join(
            f"{self.logical_axes[other] or f'dim {other}'!r} of {sizes[other]}"
            for other in others
        )
        raise InputError(
            f"fft over {self.logical_axes[dim]!r}, split over {'/'.join(split[dim])} "
            f"of size {degree(split[dim])}: no other dim divides by it to be split "
            f"meanwhile ({held or 'there is none'}); pad one, "
            f"{'give other modes, ' if self.modes else ''}or map "
            f"{self.logical_axes[dim]!r} to None"
        )

    def _sizes_at(self, dim: int) -> tuple[int, ...]:
        """Sizes when a dim is transformed."""
        halved = self.dims[-1]
        if self.modes is None or dim == halved:
            return self.shape
        return (*self.shape[:halved], self.modes, *self.shape[halved + 1 :])

    def _to(self, x: jax.Array, dim: int) -> jax.Array:
        if self.modes is None or dim != self.dims[-1]:
            return jnp.fft.fft(x, axis=dim, norm=self.norm)
        y = jnp.fft.rfft(x, axis=dim, norm=self.norm)
        return jax.lax.slice_in_dim(y, 0, self.modes, axis=dim)

    def _from(self, y: jax.Array, dim: int) -> jax.Array:
        if self.modes is None or dim != self.dims[-1]:
            return jnp.fft.ifft(y, axis=dim, norm=self.norm)
        return jnp.fft.irfft(y, n=self.shape[dim], axis=dim, norm=self.norm)


def _dims_of(logical_axes: LogicalAxes, over: Sequence[str]) -> tuple[int, ...]:
    known = [name for name in logical_axes if name is not None]
    for name in over:
        if name not in known:
            raise InputError(
                f"fft over {name!r}, but the dims are {tuple(logical_axes)}; "
                f"{nearest(name, known)}"
            )
    if not over or len(set(over)) < len(over):
        raise InputError(
            f"fft over {tuple(over)}: name one or more dims, each of them once"
        )
    return tuple(logical_axes.index(name) for name in over)


def _wide(x: jax.Array) -> jax.Array:
    """In the dtype of the transform: fp32 of what is narrower."""
    narrow = x.dtype.itemsize < 4 or not jnp.issubdtype(x.dtype, jnp.inexact)
    return x.astype(jnp.float32) if narrow else x
