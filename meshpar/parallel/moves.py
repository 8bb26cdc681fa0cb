"""Splits of arrays by a scope's rules, and all-to-alls that move them to other dims.

An operation that needs a whole dim, such as a Fourier transform, then runs on the part
of another dim that each device has. No device ever holds more than its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.collectives import asked, made_manual
from meshpar.model.scope import Scope
from meshpar.rules.rules import LogicalAxes, Rules, auto_mesh_shape, entry_axes

Split = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim of an array, outermost first; empty for a whole dim."""


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


def array_split(scope: Scope, logical_axes: LogicalAxes, shape: Sequence[int]) -> Split:
    """Return how the rules of a scope split an array over the mesh axes of GSPMD.

    Raises:
        RuleError: As for `Rules.spec`.
    """
    if scope.rules is None:
        return ((),) * len(shape)
    sizes = auto_mesh_shape()
    spec = scope.rules.spec(logical_axes, shape, mesh_shape=sizes)
    return tuple(entry_axes(entry) for entry in spec)


def degree(mesh_axes: Sequence[str]) -> int:
    """Return the number of devices along some mesh axes of GSPMD."""
    sizes = auto_mesh_shape()
    return math.prod(sizes[axis] for axis in mesh_axes)


def ruled_degree(rules: Rules, logical_axis: str) -> int:
    """Return the number of devices that the rules split a logical axis over."""
    sizes = auto_mesh_shape()
    return degree([axis for axis in rules.mesh_axes(logical_axis) if axis in sizes])


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
