"""Embedding and head of a pipeline, shared by all ranks.

The first rank's embedding and the last rank's head would leave the others idle. Here
every rank embeds its share of a microbatch, tokens or examples, and one all-gather over
`stage` gives the whole to the first; one reduce-scatter gives every rank its share of
the last stage's output, of which it computes head, loss and gradient. So no rank is
idle and no device has the logits of a whole microbatch. Each of these moves the stream
of one microbatch times (S-1)/S, forward and backward.

Published: with a vocabulary of 256k the usual placement loses half the throughput
(Yeung et al. 2024, "Balancing pipeline parallelism with vocabulary parallelism").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.collectives import asked, on_parts, sum_dtype
from meshpar.errors import InputError
from meshpar.rules.rules import auto_mesh_shape, entry_axes, spec_axes

STAGE = "stage"


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How one end of a pipeline is divided among the ranks.

    Where the stream is split along the shared dim over other mesh axes, each of their
    parts is divided by itself, so that nothing changes its place there.

    Args:
        num_ranks: Ranks of the pipeline.
        rank: The rank whose result counts where nothing is shared.
        dim: The dim of the stream that is shared: 0 for the examples, 1 for the tokens;
            None where every rank computes the whole.
        size: Its size in a microbatch; 1 where none is shared.
        specs: How each array of the stream lies over automatic mesh axes.
        parts: Parts that those axes split the dim into.
        platform: Kind of device.
    """

    num_ranks: int
    rank: int
    dim: int | None
    size: int
    specs: Any
    parts: int = 1
    platform: str = "cpu"

    def positions(self) -> jax.Array:
        """The positions along the shared dim of this rank's share."""
        return self._own(jnp.arange(self.size, dtype=jnp.int32), 0)

    def of(self, array: jax.Array, dim: int, name: str) -> jax.Array:
        """This rank's share of an array that has the shared dim as `dim`.

        Raises:
            InputError: It has another size.
        """
        if array.ndim <= dim or array.shape[dim] != self.size:
            what = "examples" if self.dim == 0 else "tokens"
            raise InputError(
                f"{name} has shape {array.shape} in a microbatch, but the ranks of the "
                f"pipeline share sequences of {self.size} {what}, which is dim {dim} "
                "of every array that has them; name those that have in Model inputs=, "
                "or in per_token= of pipeline_value_and_grad",
                key="batch.wrong_shared_size",
            )
        return self._whole_here(self._own(array, dim))

    def counted(self, tree: Any) -> Any:
        """What counts of what this rank found: all of a share, or one rank's whole."""
        if self.dim is not None:
            return tree
        here = lax.axis_index(STAGE) == self.rank
        return jax.tree.map(lambda x: jnp.where(here, x, jnp.zeros_like(x)), tree)

    def gather(self, share: Any, reason: str) -> Any:
        """All ranks' shares of a stream -> the whole, on every rank."""
        if self.dim is None:
            return share

        def local(share: jax.Array) -> jax.Array:
            with asked(reason):
                return lax.all_gather(share, STAGE, axis=self.dim, tiled=True)

        return self._over_parts(local, share)

    def scatter(self, stream: Any, reason: str) -> Any:
        """The sum over ranks of a stream, this rank's share of it."""
        if self.dim is None:
            return stream

        def local(x: jax.Array) -> jax.Array:
            # All ranks but one add zeros, so that no dtype rounds the sum.
            wide = x.astype(sum_dtype(x.dtype, self.platform))
            with asked(reason):
                wide = lax.psum_scatter(
                    wide, STAGE, scatter_dimension=self.dim, tiled=True
                )
            return wide.astype(x.dtype)

        return self._over_parts(local, stream)

    def whole(self, share: Any) -> Any:
        """What every rank made of its share -> the whole, in order, on every rank."""
        return jax.tree.map(self._whole, share)

    def share_shape(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """The shape of a rank's share of an array of the stream."""
        if self.dim is None:
            return shape
        dims = list(shape.shape)
        dims[self.dim] //= self.num_ranks
        return jax.ShapeDtypeStruct(tuple(dims), shape.dtype)

    def _whole(self, share: jax.Array) -> jax.Array:
        if self.dim is None:
            with asked("head_gather"):
                return lax.psum(self.counted(share), STAGE)
        before, after = share.shape[: self.dim], share.shape[self.dim + 1 :]
        ranks = lax.all_gather(share, STAGE)
        divided = ranks.reshape(self.num_ranks, *before, self.parts, -1, *after)
        in_order = jnp.moveaxis(divided, 0, self.dim + 1)
        return in_order.reshape(*before, self.size, *after)

    def _own(self, array: jax.Array, dim: int) -> jax.Array:
        shape = array.shape
        divided = (self.parts, self.num_ranks, -1)
        array = array.reshape(*shape[:dim], *divided, *shape[dim + 1 :])
        rank = lax.axis_index(STAGE)
        own = lax.dynamic_index_in_dim(array, rank, dim + 1, keepdims=False)
        return own.reshape(*shape[:dim], -1, *shape[dim + 1 :])

    def _whole_here(self, array: jax.Array) -> jax.Array:
        # GSPMD would split token ids as the activations are, and gather them again.
        if self.parts == 1:
            return array
        mesh = jax.sharding.get_abstract_mesh()
        whole = NamedSharding(mesh, PartitionSpec(*(None,) * array.ndim))
        return lax.with_sharding_constraint(array, whole)

    def _over_parts(self, local: Any, stream: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()

        def over(spec: PartitionSpec, x: jax.Array) -> jax.Array:
            axes = set(spec_axes(spec))
            if len(spec) == x.ndim > 0:  # GSPMD may have split it otherwise
                x = lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
            return on_parts(local, x, specs=(spec,), out_specs=spec, mesh_axes=axes)

        return jax.tree.map(over, self.specs, stream, is_leaf=is_spec)


def shareable_parts(stream: Any, specs: Any) -> dict[int, int]:
    """Each dim that ranks can share -> parts that automatic mesh axes split it into.

    Examples, dim 0, of any stream; tokens, dim 1, of a stream of one array.
    """
    leaves, sizes = jax.tree.leaves(stream), auto_mesh_shape()
    if len(leaves) > 1 or len(leaves[0].shape) < 2:
        return {0: 1}
    (spec,) = jax.tree.leaves(specs, is_leaf=is_spec)
    axes = entry_axes(spec[1]) if len(spec) > 1 else ()
    return {0: 1, 1: math.prod(sizes[axis] for axis in axes)}


def is_spec(node: Any) -> bool:
    """Whether a node of a tree of specs is one of them."""
    return isinstance(node, PartitionSpec)
