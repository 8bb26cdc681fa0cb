"""Pencils: split dims made whole by all-to-alls, transformed, and moved back, in order.

Reference: Pekurovsky 2012 (P3DFFT), section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.collectives import asked, made_manual
from meshpar.errors import InputError, nearest, whole_number
from meshpar.model.scope import Scope
from meshpar.rules.rules import LogicalAxes, Split, array_split, degree


@dataclass(frozen=True, kw_only=True)
class Move:
    """One all-to-all inside a `shard_map` that is manual over its mesh axes.

    Each of n devices sends (n-1)/n of its part.

    Args:
        mesh_axes: Mesh axes whose split moves; in `target` they become innermost.
        source: The dim that becomes whole over them.
        target: The dim that is split instead.
    """

    mesh_axes: tuple[str, ...]
    source: int
    target: int

    def __call__(self, x: jax.Array, reason: str) -> jax.Array:
        """Move this device's part `x`; `reason` is a name in `collectives.ASKED`."""
        with asked(reason):
            return lax.all_to_all(
                x,
                self.mesh_axes,
                split_axis=self.target,
                concat_axis=self.source,
                tiled=True,
            )

    @property
    def undone(self) -> Move:
        """Return the move back."""
        return Move(mesh_axes=self.mesh_axes, source=self.target, target=self.source)

    def after(self, split: Split) -> Split:
        """Return the split of an array after the move."""
        dims = list(split)
        kept = len(dims[self.source]) - len(self.mesh_axes)
        dims[self.source] = dims[self.source][:kept]
        dims[self.target] += self.mesh_axes
        return tuple(dims)


def on_split(
    function: Callable[..., jax.Array],
    *arrays: jax.Array,
    splits: Sequence[Split],
    out_split: Split,
) -> jax.Array:
    """Call a function of this device's parts of arrays, directly if none is split.

    Args:
        function: A function from parts to a part.
        arrays: Its arguments.
        splits: Split of each argument.
        out_split: Split of the result.
    """
    used = {axis for split in splits for axes in split for axis in axes}
    if not used:
        return function(*arrays)
    mapped = jax.shard_map(
        function,
        in_specs=tuple(PartitionSpec(*split) for split in splits),
        out_specs=PartitionSpec(*out_split),
        axis_names=made_manual(used),
        check_vma=False,
    )
    # JAX runs a region that is manual over some mesh axes only inside `jit`, and
    # `jax.grad` or `jax.vmap` may trace outside of it.
    return jax.jit(mapped)(*arrays)


NORMS = ("backward", "ortho", "forward")

Steps = tuple[Move | int, ...]
"""Moves, and dims to transform, in order."""


@dataclass(frozen=True, kw_only=True)
class Pencils:
    """The plan of one transform.

    Args:
        shape: Shape of the array before it.
        logical_axes: Names of its dims.
        split: Split of the array before it.
        dims: Dims to transform.
        norm: `norm` of `jnp.fft`.
        transposed: Leave out the last moves.
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
    def plan(
        cls,
        shape: Sequence[int],
        logical_axes: LogicalAxes,
        over: Sequence[str],
        scope: Scope,
        norm: str,
        transposed: bool,
    ) -> Pencils:
        """Plan a complex transform of an array over the dims of some names."""
        if norm not in NORMS:
            raise InputError(
                f"fft with norm={norm!r}: must be one of {', '.join(NORMS)}",
                key="grid.unknown_fft_norm",
            )
        if len(shape) != len(logical_axes):
            raise InputError(
                f"fft of an array of {len(shape)} dims, {tuple(shape)}, with "
                f"{len(logical_axes)} logical axes, {tuple(logical_axes)}; give a "
                "name, or None, for each dim",
                key="grid.wrong_number_of_axes",
            )
        return cls(
            shape=tuple(shape),
            logical_axes=tuple(logical_axes),
            split=array_split(scope.rules, logical_axes, shape),
            dims=named_dims(logical_axes, over),
            norm=norm,
            transposed=transposed,
        )

    def real(self, modes: int | None, caller: str) -> Pencils:
        """Return the plan of a real transform that keeps `modes` frequencies."""
        name, size = self.logical_axes[self.dims[-1]], self.shape[self.dims[-1]]
        most = size // 2 + 1
        modes = most if modes is None else whole_number(f"{caller} with modes", modes)
        if modes > most:
            raise InputError(
                f"{caller} over {name!r} of size {size} with modes={modes}: a real "
                f"transform of that size has {most} frequencies; give modes=1 to "
                f"{most}, or None for all",
                key="grid.too_many_modes",
            )
        mesh_axes = self.split[self.dims[-1]]
        devices = degree(mesh_axes)
        if modes % devices:
            below = modes - modes % devices or devices
            fewer = f"give modes={below}, or " if below <= most else "give "
            raise InputError(
                f"{caller} over {name!r} of size {size}: {modes} frequencies do not "
                f"divide over {'/'.join(mesh_axes)} of size {devices}, which splits "
                f"{name!r}; {fewer}another dim as the last of over=, or a complex one",
                key="grid.indivisible_modes",
            )
        return replace(self, modes=modes)

    def forward(self, x: jax.Array) -> jax.Array:
        """Transform an array to frequencies."""
        steps, split = self.steps

        def local(x: jax.Array) -> jax.Array:
            return self.to_frequencies(x, steps)

        return on_split(local, wide(x), splits=(self.split,), out_split=split)

    def inverse(self, y: jax.Array) -> jax.Array:
        """Transform frequencies back to an array."""
        steps, split = self.steps

        def local(y: jax.Array) -> jax.Array:
            return self.from_frequencies(y, steps)

        return on_split(local, wide(y), splits=(split,), out_split=self.split)

    def to_frequencies(self, x: jax.Array, steps: Steps) -> jax.Array:
        """Run the steps of the plan on this device's part."""
        for step in steps:
            if isinstance(step, Move):
                x = step(x, "fft")
            elif self.modes is None or step != self.dims[-1]:
                x = jnp.fft.fft(x, axis=step, norm=self.norm)
            else:
                x = jnp.fft.rfft(x, axis=step, norm=self.norm)
                x = jax.lax.slice_in_dim(x, 0, self.modes, axis=step)
        return x

    def from_frequencies(self, y: jax.Array, steps: Steps) -> jax.Array:
        """Undo `to_frequencies`."""
        for step in reversed(steps):
            if isinstance(step, Move):
                y = step.undone(y, "fft")
            elif self.modes is None or step != self.dims[-1]:
                y = jnp.fft.ifft(y, axis=step, norm=self.norm)
            else:
                size = self.shape[step]
                y = jnp.fft.irfft(y, n=size, axis=step, norm=self.norm)
        return y

    @property
    def steps(self) -> tuple[Steps, Split]:
        """Return moves and dims to transform, in order, and the result's split."""
        steps: list[Move | int] = []
        out: list[Move] = []  # moves not undone yet, to be undone from the last
        split = self.split

        def take_back(whole: tuple[int, ...]) -> None:
            """Undo moves until none of them splits these dims."""
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
        """Return the move of a dim's split to the first dim that divides.

        Dims of the transform come first, and whole ones before split ones.
        """
        others = [other for other in reversed(range(len(split))) if other != dim]
        others.sort(key=lambda other: (other not in self.dims, bool(split[other])))
        sizes = list(self.shape)
        if self.modes is not None and dim != self.dims[-1]:
            sizes[self.dims[-1]] = self.modes  # transformed before
        for other in others:
            if sizes[other] % degree(split[other] + split[dim]) == 0:
                return Move(mesh_axes=split[dim], source=dim, target=other)
        held = ", ".join(
            f"{self.logical_axes[other] or f'dim {other}'!r} of size {sizes[other]} by "
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


def named_dims(logical_axes: LogicalAxes, over: Sequence[str]) -> tuple[int, ...]:
    """Return the dims with these names, in the order of the names.

    Raises:
        InputError: A name has no dim or two, is repeated, or no name is given.
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
    """Check that an array is not complex.

    Raises:
        InputError: It is complex.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise InputError(
            f"{name} of {x.dtype} values: a real transform takes real ones; give "
            "x.real, or take fftn",
            key="grid.complex_values",
        )


def wide(x: jax.Array) -> jax.Array:
    """Convert an array to fp32 if its dtype is narrower or an integer."""
    narrow = x.dtype.itemsize < 4 or not jnp.issubdtype(x.dtype, jnp.inexact)
    return x.astype(jnp.float32) if narrow else x
