"""ZeRO: how split parameters are gathered, and their gradients reduce-scattered.

`meshpar.parallel.parameter_specs` decides how each parameter is split. The collectives
here run inside `jax.shard_map`, manual over the batch axes. For a weight of `P` values
on `n` devices, a gather brings each device the P (n-1)/n values that it lacks, in the
compute dtype; the reduce-scatter of its gradient sends as many, in fp32 by default.
Reference: Rajbhandari et al. 2020, sections 5 and 7; Zhao et al. 2023.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.collectives import asked, on_parts
from meshpar.layout import MANUAL_AXES, ZERO_AXES
from meshpar.rules.rules import entry_axes, spec_axes

Dims = list[tuple[int, tuple[str, ...]]]
"""Dims of an array, with the batch axes to gather or scatter each over."""

_JOINED_VALUES = 2**28
"""Most values of gradients that are joined for one scatter, 1 GiB in fp32: the scatter
holds three more copies."""

_PART_BYTES, _MOST_PARTS = 2**26, 4
"""Least bytes of the parts in which a gradient is scattered, about 1.3 ms between eight
hosts of H100, and most parts."""

_HALVED_VALUES = 2**25
"""Least bytes of a gradient that is summed in two halves."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Layout of one parameter at every point of a step; specs differ in batch axes.

    Args:
        spec: The parameter between steps, its final gradient, its optimizer state and
            its master copy.
        used_spec: The parameter as matmuls take it: whole over the axes of ZeRO, and
            experts split over theirs.
        loop_spec: The parameter while a step's blocks run, which gather it layer by
            layer; whole if it is outside the blocks.
        gradient_spec: Its gradient while the blocks run and add it up.
        loop_sums: Mesh axes over which the blocks sum its gradient layer by layer,
            beside those that scatter it.
        compute_dtype: Dtype of the parameter in use.
        gradient_dtype: Dtype in which its gradient is kept.
        sum_dtype: Dtype in which its gradient is summed over devices.
        scatter_columns: If above 1, gradients of a layer are scattered as the rows of
            one matrix, with columns padded to a multiple of this if there are more.
    """

    spec: PartitionSpec
    used_spec: PartitionSpec
    loop_spec: PartitionSpec
    gradient_spec: PartitionSpec
    compute_dtype: Any
    gradient_dtype: Any = jnp.float32
    sum_dtype: Any = jnp.float32
    scatter_columns: int = 1
    loop_sums: tuple[str, ...] = ()

    @property
    def reduces_in_loop(self) -> bool:
        """True if its gradient crosses batch axes before it is added up."""
        return bool(gradient_in_loop(self) or self.loop_sums)

    @property
    def automatic_spec(self) -> PartitionSpec:
        """Return the part of `spec` over mesh axes of GSPMD."""
        return _only(self.spec, lambda axis: axis not in MANUAL_AXES)

    @property
    def automatic_axes(self) -> set[str]:
        """Return the mesh axes of `automatic_spec`."""
        return set(spec_axes(self.automatic_spec))

    def without_layers(self) -> Stored:
        """Return the layout of one layer, without the leading dim."""
        names = ("spec", "used_spec", "loop_spec", "gradient_spec")
        specs: dict[str, Any] = {
            name: PartitionSpec(*getattr(self, name)[1:]) for name in names
        }
        return replace(self, **specs)

    def reduced_from_sum(self, mesh_axes: tuple[str, ...]) -> Stored:
        """Return the layout by which `reduce_in_loop` reduces a sum of gradients.

        From `gradient_spec` to `spec`, and over all mesh axes that are left.

        Args:
            mesh_axes: Mesh axes of size above 1 that split the batch, and `stage`.
        """
        summed = *spec_axes(self.spec), *self.loop_sums
        return replace(
            self,
            used_spec=self.gradient_spec,
            gradient_spec=self.spec,
            loop_sums=tuple(axis for axis in mesh_axes if axis not in summed),
        )


def manual_spec(spec: PartitionSpec) -> PartitionSpec:
    """Return the part of a spec over the manual mesh axes."""
    return _only(spec, MANUAL_AXES.__contains__)


def before_use(stored: Stored) -> Dims:
    """Return the dims of a parameter at rest to gather before its use."""
    return _moved(stored.spec, stored.used_spec)


def before_loop(stored: Stored) -> Dims:
    """Return the dims of a parameter at rest to gather before the blocks run."""
    return _moved(stored.spec, stored.loop_spec)


def in_loop(stored: Stored) -> Dims:
    """Return the dims of a parameter to gather for each layer."""
    return _moved(stored.loop_spec, stored.used_spec)


def gradient_in_loop(stored: Stored) -> Dims:
    """Return the dims of a gradient to reduce-scatter before it is added up."""
    return _moved(stored.gradient_spec, stored.used_spec)


def gradient_after_loop(stored: Stored) -> Dims:
    """Return the dims of a gradient to reduce-scatter after it was added up."""
    return _moved(stored.spec, stored.gradient_spec)


def gather(stored: Any, shards: Any, dims: Callable[[Stored], Dims]) -> Any:
    """Gather parameters in the compute dtype: one all-gather for each split one.

    Args:
        stored: Tree of `Stored`.
        shards: The same tree of this device's shards.
        dims: Function of `Stored` that returns the dims to gather, such as `in_loop`.
    """
    cast = jax.tree.map(
        lambda layout, x: x.astype(layout.compute_dtype), stored, shards
    )
    return gather_shards(stored, cast, dims)


def gather_shards(stored: Any, shards: Any, dims: Callable[[Stored], Dims]) -> Any:
    """Gather parameters, as `gather`, in the dtype that they have."""

    def gather_one(_: Stored, x: jax.Array, moved: Dims) -> jax.Array:
        for dim, mesh_axes in moved:
            with asked("parameter_gather"):
                x = lax.all_gather(x, mesh_axes, axis=dim, tiled=True)
        return x

    return _each(gather_one, stored, shards, dims)


def reduce_in_loop(stored: Any, gradients: Any) -> Any:
    """Sum one layer's gradients over batch axes, as far as the loop does.

    One reduce-scatter for each that is split while it is added up; over
    `Stored.loop_sums` one more, and an all-gather of the sums.
    """
    return jax.tree.map(_sum_in_loop, stored, _scatter_layer(stored, gradients))


def _sum_in_loop(layout: Stored, gradient: jax.Array) -> jax.Array:
    """Sum one gradient over `Stored.loop_sums`: P values send 2 P (n-1)/n.

    As a reduce-scatter and an all-gather, each half as long as an all-reduce. XLA:GPU
    joins those of a layer where they lie; it copied what it all-reduced together, and
    left small all-reduces beside nothing. A gradient without a dim that divides is
    all-reduced.
    """
    axes = layout.loop_sums
    if not axes:
        return gradient
    members = math.prod(lax.axis_size(axis) for axis in axes)
    dims = [
        dim
        for dim, entry in enumerate(layout.automatic_spec)
        if not entry and gradient.shape[dim] % members == 0
    ]

    def summed(x: jax.Array) -> jax.Array:
        x = x.astype(layout.sum_dtype)
        if not dims or gradient.size < _HALVED_VALUES:
            with asked("gradient_reduction"):
                return lax.psum(x, axes)
        x = _scatter_rows(layout, x, [(dims[0], axes)])
        with asked("gradient_gather"):
            return lax.all_gather(x, axes, axis=dims[0], tiled=True)

    return on_parts(
        summed,
        gradient,
        specs=(layout.automatic_spec,),
        out_specs=layout.automatic_spec,
        mesh_axes=layout.automatic_axes,
    )


def scatter_after_loop(stored: Any, gradients: Any) -> Any:
    """Reduce-scatter the gradients that were added up whole, and are split at last.

    One reduce-scatter for each; the others are left for `reduction.reduce_gradients`.
    """

    def scatter_one(layout: Stored, gradient: jax.Array, moved: Dims) -> jax.Array:
        x = gradient.astype(layout.sum_dtype)
        for dim, mesh_axes in moved:
            with asked("gradient_scatter"):
                x = lax.psum_scatter(x, mesh_axes, scatter_dimension=dim, tiled=True)
        return x

    return _each(scatter_one, stored, gradients, gradient_after_loop)


def _each(
    collective: Callable[[Stored, jax.Array, Dims], jax.Array],
    stored: Any,
    tree: Any,
    dims: Callable[[Stored], Dims],
) -> Any:
    def apply(layout: Stored, x: jax.Array) -> jax.Array:
        moved = dims(layout)
        if not moved:
            return x
        return on_parts(
            lambda x: collective(layout, x, moved),
            x,
            specs=(layout.automatic_spec,),
            out_specs=layout.automatic_spec,
            mesh_axes=layout.automatic_axes,
        )

    return jax.tree.map(apply, stored, tree)


def _scatter_layer(stored: Any, gradients: Any) -> Any:
    """Scatter one layer's gradients, each as the rows of a matrix.

    With `Stored.scatter_columns` (XLA:TPU) gradients with equally many rows are joined
    to one matrix, up to a size that keeps the tables of a vocabulary separate.
    """
    layouts, treedef = jax.tree.flatten(stored)
    leaves = treedef.flatten_up_to(gradients)
    joined: dict[tuple, list[list[int]]] = {}
    for at, (layout, x) in enumerate(zip(layouts, leaves, strict=True)):
        moved = gradient_in_loop(layout)
        if layout.scatter_columns > 1 and len(moved) == 1 and not layout.automatic_axes:
            [(dim, mesh_axes)] = moved
            key = x.shape[dim], mesh_axes, jnp.dtype(layout.sum_dtype)
            groups = joined.setdefault(key, [[]])
            joined_values = sum(leaves[other].size for other in groups[-1])
            if joined_values + x.size > _JOINED_VALUES:
                groups.append([])
            groups[-1].append(at)
        else:
            [leaves[at]] = _each(_scatter_rows, [layout], [x], gradient_in_loop)
    for members in filter(None, itertools.chain.from_iterable(joined.values())):
        parts = _scatter_joined(
            [layouts[at] for at in members], [leaves[at] for at in members]
        )
        for at, part in zip(members, parts, strict=True):
            leaves[at] = part
    return treedef.unflatten(leaves)


def _scatter_joined(layouts: list[Stored], leaves: list[jax.Array]) -> list[jax.Array]:
    """Scatter gradients with equally many rows as one matrix.

    XLA:TPU runs scatters one after another, so small ones delayed all matmuls of a
    block. For some numbers of columns it all-reduces instead, which is twice the bytes:
    over v5p:4x4x4 it scattered 28672 and 53248, but not 128256, 64128 and 42752.
    """
    dims = [gradient_in_loop(layout)[0] for layout in layouts]
    turned = [
        jnp.moveaxis(x.astype(layout.sum_dtype), dim, 0)
        for layout, x, (dim, _) in zip(layouts, leaves, dims, strict=True)
    ]
    matrices = [x.reshape(len(x), -1) for x in turned]
    whole = jnp.concatenate(matrices, axis=1) if len(matrices) > 1 else matrices[0]
    columns = whole.shape[1]
    if columns > layouts[0].scatter_columns:
        whole = jnp.pad(whole, ((0, 0), (0, -columns % layouts[0].scatter_columns)))
    whole = _scattered(whole, dims[0][1])
    ends = np.cumsum([matrix.shape[1] for matrix in matrices])
    parts = jnp.split(whole[:, :columns], ends[:-1], axis=1)
    return [
        jnp.moveaxis(part.reshape(len(part), *x.shape[1:]), 0, dim)
        for part, x, (dim, _) in zip(parts, turned, dims, strict=True)
    ]


def _scatter_rows(layout: Stored, gradient: jax.Array, moved: Dims) -> jax.Array:
    """Scatter one gradient as the rows of a matrix, on every platform.

    XLA:TPU does not replace this form by an all-reduce. Stacked gradients keep their
    shape (`scatter_after_loop`), because transposing them would copy them.
    """
    x = gradient.astype(layout.sum_dtype)
    for dim, mesh_axes in moved:
        x = jnp.moveaxis(x, dim, 0)
        others = x.shape[1:]
        matrix = x.reshape(len(x), -1) if others else x
        parts = [_scattered(part, mesh_axes) for part in _parts(matrix)]
        matrix = jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        x = jnp.moveaxis(matrix.reshape(len(matrix), *others), 0, dim)
    return x


def _scattered(matrix: jax.Array, mesh_axes: tuple[str, ...]) -> jax.Array:
    with asked("gradient_scatter"):
        return lax.psum_scatter(matrix, mesh_axes, scatter_dimension=0, tiled=True)


def _parts(matrix: jax.Array) -> list[jax.Array]:
    """Cut a large matrix into sets of columns, each scattered by itself.

    XLA:GPU starts a scatter shortly before it waits for it, whatever its size: of one
    over all of a last layer's backward it left half exposed. It joins the parts again
    where it joins collectives at all.
    """
    if matrix.ndim < 2:
        return [matrix]
    number = min(matrix.nbytes // _PART_BYTES, _MOST_PARTS, matrix.shape[1])
    return jnp.array_split(matrix, max(number, 1), axis=1)


def _moved(split: PartitionSpec, whole: PartitionSpec) -> Dims:
    """Return the batch axes over which only the first spec splits each dim."""
    moved = []
    for dim, (entry, kept) in enumerate(zip(split, whole, strict=True)):
        axes = tuple(
            axis
            for axis in entry_axes(entry)
            if axis in ZERO_AXES and axis not in entry_axes(kept)
        )
        if axes:
            moved.append((dim, axes))
    return moved


def _only(spec: PartitionSpec, wanted: Callable[[str], bool]) -> PartitionSpec:
    return PartitionSpec(*(tuple(filter(wanted, entry_axes(entry))) for entry in spec))
