"""Gradients reduced beside the last backwards of a step's ticks, not behind them.

A rank's gradients are complete with the backward of its last microbatch. All ranks run
the same program, so a chunk's gradients are reduced in the tick in which the last rank
completes them, each layer's beside the backward of the layer before it. Those of the
head are complete with the last microbatch's forward, and are reduced beside the next
backward. What is left for the end are the first layer's and the embedding's.
Reference: Narayanan et al. 2021; Li et al. 2020, "PyTorch Distributed", section 3.2.3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from meshpar.collectives import on_parts
from meshpar.model.parameter import Params
from meshpar.parallel.blocks import one_layer
from meshpar.parallel.pipeline.reduction import reduced_as_stored
from meshpar.parallel.placement import Placement
from meshpar.parallel.zero import Stored, gradient_in_loop, reduce_in_loop


@dataclass(frozen=True)
class LastReduction:
    """The reductions of a step's gradients beside its last backwards.

    Args:
        placement: The model on its mesh.
    """

    placement: Placement

    def chunk_reduction(self, group: int, chunks: tuple[int, ...]) -> ChunkReduction:
        """Return how a group's layers in these chunks of the rank are reduced."""
        return ChunkReduction(one_layer(self.placement.last_reductions[group]), chunks)

    def reduce_ends(self, gradients: Params, is_late: Sequence[bool]) -> Params:
        """Reduce the gradients of the ends that are complete before the last backward.

        Args:
            gradients: Sums over all microbatches, of the ends' parameters.
            is_late: For each in tree order, whether only the head uses it.
        """
        leaves, treedef = jax.tree.flatten(gradients)
        stored = jax.tree.leaves(self._ends(is_late))
        return treedef.unflatten(
            reduce_in_loop(layout, leaf) if late else leaf
            for layout, leaf, late in zip(stored, leaves, is_late, strict=True)
        )

    def reduce_rest(
        self,
        end_gradients: Params,
        group_gradients: Sequence[Params],
        is_late: Sequence[bool],
    ) -> Params:
        """Reduce what the ticks have left, and return all gradients as states lie.

        Args:
            end_gradients: From `reduce_ends`, the embedding's added.
            group_gradients: (layers, ...) of each group, from `ChunkReduction`.
            is_late: As for `reduce_ends`.
        """
        placement = self.placement
        sizes, stored = placement.mesh.shape, placement.last_reductions
        groups = [
            _reduced_part(layouts, gradients, sizes)
            for layouts, gradients in zip(stored, group_gradients, strict=True)
        ]
        join = placement.model.join
        tree = join(self._ends(is_late), stored), join(end_gradients, groups)
        return reduced_as_stored(placement, *tree)

    def _ends(self, is_late: Sequence[bool]) -> Params:
        """Return the ends' `Stored` as they are reduced, late ones from their sums."""
        placement = self.placement
        axes = placement.large(placement.manual_axes)
        leaves, treedef = jax.tree.flatten(placement.model.split(placement.stored)[0])
        return treedef.unflatten(
            layout.reduced_from_sum(axes) if late else layout
            for layout, late in zip(leaves, is_late, strict=True)
        )


@dataclass(frozen=True)
class ChunkReduction:
    """Sums of a group's layers, reduced one layer after another.

    A result takes the first part of its sum's place: no second buffer is needed.

    Args:
        stored: Tree of `Stored` of one layer, from `Stored.reduced_from_sum`.
        chunks: Chunks of the rank whose gradients are complete.
    """

    stored: Any
    chunks: tuple[int, ...]

    def reduced(self, totals: Any, place: Any) -> list[Any]:
        """Sum the gradients of a layer of each chunk over devices.

        Args:
            totals: (chunks, places, ...) each.
            place: Of the layer.
        """

        def one(layout: Stored, total: jax.Array, chunk: int) -> jax.Array:
            return in_own_layout(layout, total[chunk, place])

        layers = [
            jax.tree.map(functools.partial(one, chunk=chunk), self.stored, totals)
            for chunk in self.chunks
        ]
        return [reduce_in_loop(self.stored, layer) for layer in layers]

    def replaced(self, totals: Any, results: list[Any], place: Any) -> Any:
        """Write results of `reduced` into the totals."""

        def write(
            layout: Stored, total: jax.Array, result: jax.Array, chunk: int
        ) -> jax.Array:
            start = chunk, place, *(0 for _ in result.shape)
            written = in_own_layout(layout, result.astype(total.dtype))
            return lax.dynamic_update_slice(total, written[None, None], start)

        for chunk, result in zip(self.chunks, results, strict=True):
            one = functools.partial(write, chunk=chunk)
            totals = jax.tree.map(one, self.stored, totals, result)
        return totals


def in_own_layout(layout: Stored, x: jax.Array) -> jax.Array:
    """Return the array, behind a barrier to XLA's choice of the order of its dims.

    A collective wants the dim that it splits first, and XLA:GPU transposed the sums of
    all layers for that, twice, and kept both.
    """

    def apart(x: jax.Array) -> jax.Array:
        return lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)

    return on_parts(
        apart,
        x,
        specs=(layout.automatic_spec,),
        out_specs=layout.automatic_spec,
        mesh_axes=layout.automatic_axes,
    )


def _reduced_part(stored: Any, totals: Any, sizes: Mapping[str, int]) -> Any:
    """Return the part of each total that `ChunkReduction` wrote."""

    def part(layout: Stored, total: jax.Array) -> jax.Array:
        for dim, axes in gradient_in_loop(layout):
            size = total.shape[dim] // math.prod(sizes[axis] for axis in axes)
            total = lax.slice_in_dim(total, 0, size, axis=dim)
        return total

    return jax.tree.map(part, stored, totals)
