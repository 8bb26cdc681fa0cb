"""All-to-alls that move the split of an array from one of its dims to another.

An operation that needs a whole dim, such as a Fourier transform, then runs on the part
of another dim that each device has. No device ever holds more than its share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.collectives import asked, made_manual
from meshpar.rules.rules import Split


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
