"""What the functions of a model may know of the place where they run."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshpar.rules.rules import LogicalAxes, Rules, auto_mesh_shape, spec_axes

Batch = Mapping[str, jax.Array]

SAVED_PREFIX = "meshpar."
"""Begins the name of every residual that a block asked to keep."""

EXAMPLE = "example"
"""Key of the batch array with each example's index in the global batch."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What a model's function may know of the place where it runs.

    Args:
        rules: How arrays are laid out; None outside any mesh.
        batch: The inputs of these examples, those that need no gradient.
        layer: Index of the layer; -1 outside the blocks.
        token_positions: Positions in the sequence of the tokens at hand; None if they
            are the whole sequence.
        full_seq: Tokens of the whole sequence, where those at hand are a share of it.
        dropout_key: Key of (seed, step); None turns dropout off.
        platform: Kind of device the program is for: `cpu`, `gpu` or `tpu`.
    """

    rules: Rules | None = None
    batch: Batch = field(default_factory=dict)
    layer: jax.Array | int = -1
    dropout_key: jax.Array | None = None
    token_positions: jax.Array | None = None
    full_seq: int | None = None
    platform: str = "cpu"

    def constrain(self, x: jax.Array, logical_axes: LogicalAxes) -> jax.Array:
        """`x` laid out by the rules (`Rules.constrain`); `x` itself outside a mesh."""
        return x if self.rules is None else self.rules.constrain(x, logical_axes)

    def map_shards(
        self,
        function: Callable[..., jax.Array],
        in_axes: Sequence[LogicalAxes],
        out_axes: LogicalAxes,
    ) -> Callable[..., jax.Array]:
        """`function` of this device's shards, for work that needs no other shard.

        Args:
            function: Takes and returns arrays; sees local shapes.
            in_axes: Logical axes of each argument.
            out_axes: Logical axes of the result.
        """
        if self.rules is None:
            return function

        def mapped(*arrays: jax.Array) -> jax.Array:
            layouts = zip(in_axes, arrays, strict=True)
            specs = tuple(self._spec(axes, array.shape) for axes, array in layouts)
            used = {axis for spec in specs for axis in spec_axes(spec)}
            if not used:
                return function(*arrays)
            out_shape = jax.eval_shape(function, *arrays).shape
            return jax.shard_map(
                function,
                in_specs=specs,
                out_specs=self._spec(out_axes, out_shape),
                axis_names=used,
                check_vma=False,
            )(*arrays)

        return mapped

    def same_layout(
        self,
        one_axes: LogicalAxes,
        other_axes: LogicalAxes,
        one_shape: Sequence[int],
        other_shape: Sequence[int],
    ) -> bool:
        """Whether two arrays are split alike, dim by dim."""
        if self.rules is None:
            return True
        return self._spec(one_axes, one_shape) == self._spec(other_axes, other_shape)

    def _spec(self, logical_axes: LogicalAxes, shape: Sequence[int]) -> PartitionSpec:
        return self.rules.spec(logical_axes, shape, mesh_shape=auto_mesh_shape())

    def save(self, x: jax.Array, name: str) -> jax.Array:
        """`x`, named: `remat=selective` keeps it instead of recomputing it.

        `remat=save:NAME` keeps those named alone, `remat=offload:NAME` in the host's
        memory.
        """
        return checkpoint_name(x, SAVED_PREFIX + name)

    def positions(self, seq: int) -> jax.Array:
        """Positions in the sequence of the `seq` tokens at hand."""
        if self.token_positions is None:
            return jnp.arange(seq, dtype=jnp.int32)
        return self.token_positions

    def dropout(self, x: jax.Array, rate: float, name: str) -> jax.Array:
        """`x` with a share `rate` of its values zeroed and the rest scaled up.

        The mask is a function of (seed, step, layer, `name`, example) only. `x` has
        the example as its first dim.
        """
        if self.dropout_key is None or rate == 0.0:
            return x
        key = jax.random.fold_in(self.dropout_key, zlib.crc32(name.encode()))
        key = jax.random.fold_in(key, jnp.asarray(self.layer).astype(jnp.uint32))
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, self.batch[EXAMPLE])
        shape = x.shape[1:]
        if self.full_seq is not None:
            shape = (self.full_seq, *shape[1:])
        keep = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, shape))(keys)
        if self.token_positions is not None:
            keep = keep[:, self.token_positions]
        return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)

    @property
    def in_order(self) -> bool:
        """Whether collectives must wait for one another (`meshpar.collectives`)."""
        return self.rules is not None and self.platform == "cpu"

    def at_layer(self, layer: jax.Array) -> Scope:
        """This scope inside block `layer`."""
        return replace(self, layer=layer)
