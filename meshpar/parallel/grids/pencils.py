"""Pencils: in which order split dims are made whole, transformed and moved back.

Reference: Pekurovsky 2012 (P3DFFT), section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from meshpar.errors import InputError, nearest, whole_number
from meshpar.model.scope import Scope
from meshpar.parallel.moves import Move, Split, degree, on_split, split_of
from meshpar.rules.rules import LogicalAxes

NORMS = ("backward", "ortho", "forward")

Steps = tuple[Move | int, ...]
"""What is done in order: moves, and dims to transform."""


@dataclass(frozen=True, kw_only=True)
class Pencils:
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
    ) -> Pencils:
        if norm not in NORMS:
            raise InputError(
                f"fft with norm={norm!r}: must be one of {', '.join(NORMS)}",
                key="grid.unknown_fft_norm",
            )
        _check_named(shape, logical_axes)
        return cls(
            shape=tuple(shape),
            logical_axes=tuple(logical_axes),
            split=split_of(scope, logical_axes, shape),
            dims=dims_of(logical_axes, over),
            norm=norm,
            transposed=transposed,
        )

    def real(self, modes: int | None, caller: str) -> Pencils:
        """The plan of a caller's real transform that keeps so many frequencies."""
        name, size = self.logical_axes[self.dims[-1]], self.shape[self.dims[-1]]
        there = size // 2 + 1
        modes = there if modes is None else whole_number(f"{caller} with modes", modes)
        if modes > there:
            raise InputError(
                f"{caller} over {name!r} of size {size} with modes={modes}: a real "
                f"transform of that size has {there} frequencies; give modes=1 to "
                f"{there}, or None for all",
                key="grid.too_many_modes",
            )
        mesh_axes = self.split[self.dims[-1]]
        devices = degree(mesh_axes)
        if modes % devices:
            below = modes - modes % devices or devices
            fewer = f"give modes={below}, or " if below <= there else "give "
            raise InputError(
                f"{caller} over {name!r} of size {size}: {modes} frequencies do not "
                f"divide over {'/'.join(mesh_axes)} of size {devices}, which splits "
                f"{name!r}; {fewer}another dim as the last of over=, or a complex one",
                key="grid.indivisible_modes",
            )
        return replace(self, modes=modes)

    def forward(self, x: jax.Array) -> jax.Array:
        """Frequencies of an array."""
        steps, split = self.steps

        def local(x: jax.Array) -> jax.Array:
            return self.to_frequencies(x, steps)

        return on_split(local, wide(x), splits=(self.split,), out_split=split)

    def inverse(self, y: jax.Array) -> jax.Array:
        """The array of frequencies."""
        steps, split = self.steps

        def local(y: jax.Array) -> jax.Array:
            return self.from_frequencies(y, steps)

        return on_split(local, wide(y), splits=(split,), out_split=self.split)

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
            f"{_called(self.logical_axes, other)} of size {sizes[other]} by "
            f"{degree(split[other] + split[dim])}"
            for other in others
        )
        raise InputError(
            f"fft over {self.logical_axes[dim]!r}, split over {'/'.join(split[dim])} "
            f"of size {degree(split[dim])}: another dim has to be split while that one "
            f"is whole, and none divides ({held or 'there is none'}); pad one of them, "
            f"{'give other modes, ' if self.modes else ''}or map "
            f"{self.logical_axes[dim]!r} to None in the rules",
            key="grid.indivisible_fft",
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


def dims_of(logical_axes: LogicalAxes, over: Sequence[str]) -> tuple[int, ...]:
    """The dims of those names, in their order.

    Raises:
        InputError: A name is of no dim or of two, or there is none, or one alone.
    """
    if isinstance(over, str):
        raise InputError(
            f"fft over {over!r}: give a tuple, ({over!r},)",
            key="grid.fft_dims_not_a_tuple",
        )
    known = [name for name in logical_axes if name is not None]
    for name in over:
        if name not in known:
            raise InputError(
                f"fft over {name!r}, but the dims are {tuple(logical_axes)}; "
                f"{nearest(name, known)}",
                key="grid.unknown_fft_dim",
            )
        if known.count(name) > 1:
            raise InputError(
                f"fft over {name!r}, but {known.count(name)} of the dims "
                f"{tuple(logical_axes)} have that name; rename all but one",
                key="grid.ambiguous_fft_dim",
            )
    if not over or len(set(over)) < len(over):
        raise InputError(
            f"fft over {tuple(over)}: name one or more of the dims "
            f"{tuple(logical_axes)}, each of them once",
            key="grid.fft_dims_not_once",
        )
    return tuple(logical_axes.index(name) for name in over)


def check_real(x: jax.Array, name: str) -> None:
    """Refuses a complex array.

    Raises:
        InputError: It is one.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise InputError(
            f"{name} of {x.dtype} values: a real transform takes real ones; give "
            "x.real, or take fftn",
            key="grid.complex_values",
        )


def _check_named(shape: Sequence[int], logical_axes: LogicalAxes) -> None:
    if len(shape) != len(logical_axes):
        raise InputError(
            f"fft of an array of {len(shape)} dims, {tuple(shape)}, with "
            f"{len(logical_axes)} logical axes, {tuple(logical_axes)}; give a name, or "
            "None, for each dim",
            key="grid.wrong_number_of_axes",
        )


def _called(logical_axes: LogicalAxes, dim: int) -> str:
    return repr(logical_axes[dim] or f"dim {dim}")


def wide(x: jax.Array) -> jax.Array:
    """In the dtype of the transform: fp32 of what is narrower."""
    narrow = x.dtype.itemsize < 4 or not jnp.issubdtype(x.dtype, jnp.inexact)
    return x.astype(jnp.float32) if narrow else x
