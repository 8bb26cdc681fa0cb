"""All that crosses the `stage` mesh axis in a tick: shares of the ends, and payloads.

*Ends.* The first rank's embedding and the last rank's head would leave the others idle.
So every rank embeds its share of a microbatch, tokens or examples, and one all-gather
over `stage` gives the whole to the first; one reduce-scatter gives every rank its share
of the last stage's output, of which it computes head, loss and gradient. No rank is
idle and no device has the logits of a whole microbatch. Each of these moves the stream
of one microbatch times (S-1)/S, forward and backward.

*Payloads* are what passes between stages: the streams that cross from one to the next.
Streams of the same shapes share a slot; the ranks that read a slot know which group's
stream it holds. All ranks send the same shapes, zeros where they have no such stream,
with one collective-permute for each array and hop: a rank sends all bytes of a payload.

Published: with a vocabulary of 256k the usual placement loses half the throughput
(Yeung et al. 2024, "Balancing pipeline parallelism with vocabulary parallelism").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.collectives import asked, on_parts, sum_dtype
from meshpar.errors import InputError
from meshpar.model.contract import RESIDUAL, Stream
from meshpar.parallel.pipeline.stages import part
from meshpar.rules.rules import Rules, auto_mesh_shape, entry_axes, is_axes, spec_axes

STAGE = "stage"

Payload = Any
"""Arrays that one stage hands to the next: a tuple of the streams that cross."""


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
        """Return the positions along the shared dim of this rank's share."""
        return self._own(jnp.arange(self.size, dtype=jnp.int32), 0)

    def own_part(self, array: jax.Array, dim: int, name: str) -> jax.Array:
        """Return this rank's share of an array that has the shared dim as `dim`.

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
        """Return a rank's results: all of a share; zeros but on one rank of a whole."""
        if self.dim is not None:
            return tree
        here = lax.axis_index(STAGE) == self.rank
        return jax.tree.map(lambda x: jnp.where(here, x, jnp.zeros_like(x)), tree)

    def gather(self, share: Any, reason: str) -> Any:
        """Return the whole stream, on every rank, from all ranks' shares."""
        if self.dim is None:
            return share

        def local(share: jax.Array) -> jax.Array:
            with asked(reason):
                return lax.all_gather(share, STAGE, axis=self.dim, tiled=True)

        return self._over_parts(local, share)

    def scatter(self, stream: Any, reason: str) -> Any:
        """Return this rank's share of a stream summed over the ranks."""
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
        """Return all ranks' results of their shares, in order, on every rank."""
        return jax.tree.map(self._whole, share)

    def share_shape(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return the shape of a rank's share of an array of the stream."""
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
    """Return the dims that ranks can share, each with its parts over automatic axes.

    Examples, dim 0, of any stream; tokens, dim 1, of a stream of one array.
    """
    leaves, sizes = jax.tree.leaves(stream), auto_mesh_shape()
    if len(leaves) > 1 or len(leaves[0].shape) < 2:
        return {0: 1}
    (spec,) = jax.tree.leaves(specs, is_leaf=is_spec)
    axes = entry_axes(spec[1]) if len(spec) > 1 else ()
    return {0: 1, 1: math.prod(sizes[axis] for axis in axes)}


def stream_specs(axes: Any, stream: Stream, rules: Rules) -> Any:
    """Return the spec of each array of a group's stream over automatic mesh axes.

    The spec of an array without logical axes is empty; others are as long as its dims.

    Args:
        axes: Tree of logical axes (`BlockGroup.stream`), or None.
        stream: The arrays of this device's examples, or their shapes.
        rules: Logical axis -> mesh axes.

    Raises:
        InputError: The stream is not the declared tree.
        RuleError: An array of it cannot be laid out.
    """
    _check_real(stream)

    def spec(names: tuple[str | None, ...], x: Any) -> PartitionSpec:
        if not names:
            return PartitionSpec()
        return rules.spec(names, x.shape, mesh_shape=auto_mesh_shape(), path="stream")

    def default_spec(x: Any) -> PartitionSpec:
        is_residual = len(x.shape) == 3 and "residual_seq" in rules.table
        return spec(RESIDUAL if is_residual else (), x)

    if axes is None:
        return jax.tree.map(default_spec, stream)
    declared = jax.tree.structure(axes, is_leaf=is_axes)
    if declared != jax.tree.structure(stream):
        raise InputError(
            f"the stream is declared as {axes}, but the functions make "
            f"{jax.tree.map(jnp.shape, stream)}; declare a tuple of logical axes for "
            "each of its arrays",
            key="model.stream_of_other_tree",
        )
    return jax.tree.map(spec, axes, stream, is_leaf=is_axes)


def _check_real(stream: Stream) -> None:
    for path, x in jax.tree.leaves_with_path(stream):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise InputError(
                f"the stream holds {x.dtype}{x.shape} at "
                f"{jax.tree_util.keystr(path) or 'its root'}, but what flows between "
                "blocks has gradients; read integers from scope.batch",
                key="model.integer_stream",
            )


def is_spec(node: Any) -> bool:
    """Return True if a node of a tree of specs is a spec."""
    return isinstance(node, PartitionSpec)


@dataclass(frozen=True, kw_only=True)
class Payloads:
    """Which stream lies where in the payloads of one pipeline.

    Args:
        streams: Shapes of each group's stream.
        crossing: The groups whose stream leaves a rank, first to last.
    """

    streams: Sequence[Any]
    crossing: Sequence[int]

    @cached_property
    def slots(self) -> tuple[int | None, ...]:
        """Place of each group's stream in a payload; None if it is in none."""
        kinds = [
            (
                jax.tree.structure(stream),
                tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(stream)),
            )
            for stream in self.streams
        ]
        places = list(dict.fromkeys(kinds[group] for group in self.crossing))
        return tuple(
            places.index(kind) if group in self.crossing else None
            for group, kind in enumerate(kinds)
        )

    def holding(self, group: int, stream: Any) -> Payload:
        """Return a payload with a group's stream in its place, zeros elsewhere."""
        own = self.slots[group]
        if own is None:
            raise ValueError(f"the stream of group {group} never leaves a rank")
        return tuple(
            stream if slot == own else zero_arrays(shape)
            for slot, shape in enumerate(self.shapes)
        )

    @property
    def shapes(self) -> Payload:
        """Shapes of every payload."""
        return self.places(self.streams)

    def places(self, values: Sequence[Any]) -> Payload:
        """Return for each place of a payload the value of the first group in it."""
        num_places = 1 + max(slot for slot in self.slots if slot is not None)
        return tuple(values[self.slots.index(slot)] for slot in range(num_places))

    def stream(self, group: int, payload: Payload) -> Stream:
        """Return a group's stream of a payload; zeros if it is in none."""
        slot = self.slots[group]
        return zero_arrays(self.streams[group]) if slot is None else payload[slot]

    def added(self, payload: Payload, group: int, stream: Stream) -> Payload:
        """Return a payload with a group's stream added in its place."""
        slot = self.slots[group]
        if slot is None:
            return payload
        parts = list(payload)
        parts[slot] = jax.tree.map(jnp.add, parts[slot], stream)
        return tuple(parts)


def zero_arrays(shapes: Any) -> Any:
    """Return zeros of the shapes and dtypes of a tree."""
    return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)


@dataclass(frozen=True, kw_only=True)
class Hops:
    """The permutes of payloads, laid out as their streams are.

    Other mesh axes than `stage` move their own parts.

    Args:
        num_ranks: Ranks of the pipeline.
        specs: How each array of a payload lies over automatic mesh axes.
    """

    num_ranks: int
    specs: Any

    def sent(
        self, payload: Payload, before: Any, hops: tuple[int, ...], reason: str
    ) -> list[Payload]:
        """Send a payload by each hop, once `before` is there; return what arrives."""
        payload = after(payload, before)
        return [self._permute(payload, hop, reason) for hop in hops]

    def laid_out(self, payload: Payload) -> Payload:
        """Return a payload, or buffers of payloads, constrained to its specs."""

        def constrained(spec: PartitionSpec, x: jax.Array) -> jax.Array:
            if not spec_axes(spec):
                return x
            leading = (None,) * (x.ndim - len(spec))
            mesh = jax.sharding.get_abstract_mesh()
            sharding = NamedSharding(mesh, PartitionSpec(*leading, *spec))
            return lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(constrained, self.specs, payload, is_leaf=is_spec)

    def _permute(self, payload: Payload, hop: int, reason: str) -> Payload:
        pairs = [
            (rank, (rank + hop) % self.num_ranks) for rank in range(self.num_ranks)
        ]

        def local(x: jax.Array) -> jax.Array:
            with asked(reason):
                return lax.ppermute(x, STAGE, pairs)

        def permute(spec: PartitionSpec, x: jax.Array) -> jax.Array:
            axes = set(spec_axes(spec))
            return on_parts(local, x, specs=(spec,), out_specs=spec, mesh_axes=axes)

        return jax.tree.map(permute, self.specs, payload, is_leaf=is_spec)


def after(payload: Any, before: Any) -> Any:
    """Return the payload, for use once `before` is there too."""
    return payload if before is None else lax.optimization_barrier((payload, before))[0]


def read(buffers: Any, slot: jax.Array) -> Any:
    """Return the contents of a slot of buffers; of the first if it is negative."""
    return part(buffers, jnp.maximum(slot, 0))


def write(buffers: Any, slot: jax.Array, values: Any) -> Any:
    """Return buffers with `values` in a slot; unchanged if the slot is negative."""

    def one(buffer: jax.Array, value: jax.Array) -> jax.Array:
        value = jnp.where(slot >= 0, value.astype(buffer.dtype), read(buffer, slot))
        return lax.dynamic_update_index_in_dim(buffer, value, jnp.maximum(slot, 0), 0)

    return jax.tree.map(one, buffers, values)
