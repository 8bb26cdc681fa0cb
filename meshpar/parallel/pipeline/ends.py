"""Embedding and head of a pipeline, shared by all ranks.

The first rank's embedding and the last rank's head would leave the others idle. Here
every rank embeds its share of a microbatch's tokens, and one all-gather over `stage`
gives the whole to the first; one reduce-scatter gives every rank its share of the last
stage's output, of which it computes head, loss and gradient. So no rank is idle and no
device has the logits of a whole microbatch. Each of these moves the (batch, seq,
embed) of one microbatch times (S-1)/S, forward and backward.

Published: with a vocabulary of 256k the usual placement loses half the throughput
(Yeung et al. 2024, "Balancing pipeline parallelism with vocabulary parallelism").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.collectives import asked, on_parts
from meshpar.errors import InputError
from meshpar.rules.rules import spec_axes

STAGE = "stage"


@dataclass(frozen=True)
class Shares:
    """How a microbatch's tokens are divided among the ranks.

    Where the residual stream is split along its sequence over other mesh axes, each of
    their parts is divided by itself, so that no token changes its place there.

    Args:
        num_ranks: Ranks of the pipeline.
        shared: Whether each rank has a share; otherwise all have all tokens, and what
            the first finds counts.
        seq: Tokens of a sequence.
        spec: How (batch, seq, embed) lies over automatic mesh axes.
        parts: Parts that those axes split the sequence into.
        sums_wide: Whether sums are made in fp32.
    """

    num_ranks: int
    shared: bool
    seq: int
    spec: PartitionSpec
    parts: int
    sums_wide: bool

    def positions(self) -> jax.Array:
        """The positions in the sequence of this rank's tokens."""
        every = jnp.arange(self.seq, dtype=jnp.int32)
        return self._own(every, 0)

    def of_sequence(self, array: jax.Array, name: str) -> jax.Array:
        """This rank's tokens of an array (batch, seq, ...).

        Raises:
            InputError: It has another number of tokens.
        """
        if array.ndim < 2 or array.shape[1] != self.seq:
            raise InputError(
                f"{name} has shape {array.shape} in a microbatch, but the ranks of "
                f"the pipeline share sequences of {self.seq} tokens, which is dim 1 of "
                "every array that has them; name those that have in Model "
                "sequence_inputs=, or in per_token= of pipeline_value_and_grad"
            )
        return self._whole_here(self._own(array, 1))

    def counts(self) -> jax.Array:
        """Whether this rank's loss and gradients of the ends count."""
        return jnp.asarray(True) if self.shared else lax.axis_index(STAGE) == 0

    def gather(self, share: jax.Array, reason: str) -> jax.Array:
        """All ranks' shares (batch, seq / ranks, embed) -> (batch, seq, embed)."""
        if not self.shared:
            return self.scatter(jnp.where(self.counts(), share, 0), reason)

        def local(share: jax.Array) -> jax.Array:
            with asked(reason):
                return lax.all_gather(share, STAGE, axis=1, tiled=True)

        return self._over_parts(local, share)

    def scatter(self, x: jax.Array, reason: str) -> jax.Array:
        """The sum over ranks of (batch, seq, embed), this rank's share of it."""

        def local(x: jax.Array) -> jax.Array:
            with asked(reason):
                if not self.shared:
                    return lax.psum(x, STAGE)
                return lax.psum_scatter(x, STAGE, scatter_dimension=1, tiled=True)

        # XLA:CPU aborts on a 16-bit sum here; all ranks but one add zeros, so that no
        # dtype rounds it.
        wide = x.astype(jnp.float32) if self.sums_wide else x
        return self._over_parts(local, wide).astype(x.dtype)

    def whole(self, share: jax.Array) -> jax.Array:
        """(batch, seq / ranks, ...) of every rank -> (batch, seq, ...), in order."""
        if not self.shared:
            return share
        ranks = lax.all_gather(share, STAGE)
        divided = ranks.reshape(
            self.num_ranks, share.shape[0], self.parts, -1, *share.shape[2:]
        )
        in_order = jnp.moveaxis(divided, 0, 2)
        return in_order.reshape(share.shape[0], self.seq, *share.shape[2:])

    def _own(self, array: jax.Array, dim: int) -> jax.Array:
        if not self.shared:
            return array
        shape = array.shape
        divided = (self.parts, self.num_ranks, -1)
        array = array.reshape(*shape[:dim], *divided, *shape[dim + 1 :])
        rank = lax.axis_index(STAGE)
        own = lax.dynamic_index_in_dim(array, rank, dim + 1, keepdims=False)
        return own.reshape(*shape[:dim], -1, *shape[dim + 1 :])

    def _whole_here(self, array: jax.Array) -> jax.Array:
        # GSPMD would split token ids as the activations are, and gather them again.
        if not spec_axes(self.spec):
            return array
        mesh = jax.sharding.get_abstract_mesh()
        whole = NamedSharding(mesh, PartitionSpec(*(None,) * array.ndim))
        return lax.with_sharding_constraint(array, whole)

    def _over_parts(self, local: Any, x: jax.Array) -> jax.Array:
        return on_parts(
            local,
            x,
            specs=(self.spec,),
            out_specs=self.spec,
            mesh_axes=set(spec_axes(self.spec)),
        )
