"""ZeRO: what the devices of a split batch share out, gathered and reduce-scattered.

Inside `jax.shard_map`, manual over the batch axes. `n` devices of a weight of `P`
values: a gather brings each device the P (n-1)/n values it lacks, in the compute dtype
on the way to use; a reduce-scatter of its gradient sends as many, in fp32 by default.
Reference: Rajbhandari et al. 2020, sections 5 and 7; Zhao et al. 2023.
"""

from __future__ import annotations

import itertools
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
"""Dims of an array, each with the batch axes that it is split over."""

_JOINED_VALUES = 2**28
"""Most of gradients that are joined for one scatter, which holds them three times more:
1 GiB in fp32."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """How one parameter lies at every point of a step; specs differ in batch axes.

    Args:
        spec: The parameter at rest.
        used_spec: The parameter whole over the axes of ZeRO, as matmuls take it;
            experts stay split over theirs.
        loop_spec: The parameter while a step's blocks run, gathered layer by layer
            from there; whole outside the blocks.
        gradient_spec: Its gradient while they run, as it is added up.
        state_spec: Its gradient after them, its optimizer state and its master copy.
        compute_dtype: Its dtype in use.
        gradient_dtype: In which its gradient is kept.
        sum_dtype: In which its gradient is summed over devices.
        scatter_columns: Above 1, gradients of a layer are scattered as the rows of one
            matrix, whose columns are padded to a multiple of this where there are more.
    """

    spec: PartitionSpec
    used_spec: PartitionSpec
    loop_spec: PartitionSpec
    gradient_spec: PartitionSpec
    state_spec: PartitionSpec
    compute_dtype: Any
    gradient_dtype: Any = jnp.float32
    sum_dtype: Any = jnp.float32
    scatter_columns: int = 1

    @property
    def automatic_spec(self) -> PartitionSpec:
        """The part of the layout that GSPMD keeps."""
        return _only(self.spec, lambda axis: axis not in MANUAL_AXES)

    @property
    def automatic_axes(self) -> set[str]:
        """The mesh axes of `automatic_spec`."""
        return set(spec_axes(self.automatic_spec))

    def without_layers(self) -> Stored:
        """The same of one layer, its leading dim gone."""
        names = ("spec", "used_spec", "loop_spec", "gradient_spec", "state_spec")
        specs: dict[str, Any] = {
            name: PartitionSpec(*getattr(self, name)[1:]) for name in names
        }
        return replace(self, **specs)


def manual_spec(spec: PartitionSpec) -> PartitionSpec:
    """The part of a layout that `jax.shard_map` over the manual axes splits."""
    return _only(spec, MANUAL_AXES.__contains__)


def before_use(stored: Stored) -> Dims:
    """What is gathered of a parameter at rest, to have it whole."""
    return _moved(stored.spec, stored.used_spec)


def before_loop(stored: Stored) -> Dims:
    """What is gathered once, before the blocks run."""
    return _moved(stored.spec, stored.loop_spec)


def in_loop(stored: Stored) -> Dims:
    """What is gathered for each layer."""
    return _moved(stored.loop_spec, stored.used_spec)


def gradient_in_loop(stored: Stored) -> Dims:
    """What a gradient is reduce-scattered over before it is added up."""
    return _moved(stored.gradient_spec, stored.used_spec)


def gradient_after_loop(stored: Stored) -> Dims:
    """What gradients that were added up are reduce-scattered over."""
    return _moved(stored.state_spec, stored.gradient_spec)


def after_update(stored: Stored) -> Dims:
    """What is gathered of an updated parameter."""
    return _moved(stored.state_spec, stored.spec)


def gather(stored: Any, shards: Any, dims: Callable[[Stored], Dims]) -> Any:
    """Parameters for use: one all-gather for each that is split over batch axes.

    Args:
        stored: Tree of `Stored`.
        shards: The same tree of this device's shards.
        dims: What is gathered.

    Returns:
        The parameters in the compute dtype.
    """
    cast = jax.tree.map(
        lambda layout, x: x.astype(layout.compute_dtype), stored, shards
    )
    return gather_shards(stored, cast, dims)


def gather_shards(stored: Any, shards: Any, dims: Callable[[Stored], Dims]) -> Any:
    """`gather`, of values in the dtype they have."""
    return _each(_gather_one, stored, shards, dims)


def reduce_scatter(stored: Any, gradients: Any, dims: Callable[[Stored], Dims]) -> Any:
    """Gradients summed over batch axes, this device's shards of the sums.

    One reduce-scatter for each; those that are not split there are left for
    `data.reduce_gradients`. Arguments as for `gather`.
    """
    if dims is not gradient_in_loop:
        return _each(_scatter_one, stored, gradients, dims)
    return _scatter_layer(stored, gradients)


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


def _gather_one(_: Stored, x: jax.Array, moved: Dims) -> jax.Array:
    for dim, mesh_axes in moved:
        with asked("parameter_gather"):
            x = lax.all_gather(x, mesh_axes, axis=dim, tiled=True)
    return x


def _scatter_one(layout: Stored, gradient: jax.Array, moved: Dims) -> jax.Array:
    x = gradient.astype(layout.sum_dtype)
    for dim, mesh_axes in moved:
        with asked("gradient_scatter"):
            x = lax.psum_scatter(x, mesh_axes, scatter_dimension=dim, tiled=True)
    return x


def _scatter_layer(stored: Any, gradients: Any) -> Any:
    """One layer's gradients, each as a matrix whose rows are scattered.

    With `Stored.scatter_columns` (XLA:TPU) those of as many rows are joined to one, up
    to a size: a vocabulary's tables stay alone.
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
            if sum(leaves[one].size for one in groups[-1]) + x.size > _JOINED_VALUES:
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
    """Gradients of as many rows as one matrix.

    XLA:TPU scatters one after another, and left small ones all the matmuls of a block.
    It all-reduces some numbers of columns, which is twice the bytes: over v5p:4x4x4 it
    scattered 28672 and 53248, not 128256, 64128 and 42752.
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
    with asked("gradient_scatter"):
        whole = lax.psum_scatter(whole, dims[0][1], scatter_dimension=0, tiled=True)
    ends = np.cumsum([matrix.shape[1] for matrix in matrices])
    parts = jnp.split(whole[:, :columns], ends[:-1], axis=1)
    return [
        jnp.moveaxis(part.reshape(len(part), *x.shape[1:]), 0, dim)
        for part, x, (dim, _) in zip(parts, turned, dims, strict=True)
    ]


def _scatter_rows(layout: Stored, gradient: jax.Array, moved: Dims) -> jax.Array:
    """One gradient as a matrix whose rows are scattered, on every platform.

    XLA:TPU does not all-reduce this form. Gradients of all layers keep theirs
    (`_scatter_one`): to turn them would copy them.
    """
    x = gradient.astype(layout.sum_dtype)
    for dim, mesh_axes in moved:
        x = jnp.moveaxis(x, dim, 0)
        others = x.shape[1:]
        matrix = x.reshape(len(x), -1) if others else x
        with asked("gradient_scatter"):
            matrix = lax.psum_scatter(
                matrix, mesh_axes, scatter_dimension=0, tiled=True
            )
        x = jnp.moveaxis(matrix.reshape(len(matrix), *others), 0, dim)
    return x


def _moved(split: PartitionSpec, whole: PartitionSpec) -> Dims:
    """The batch axes that each dim is split over in one layout and not in the other."""
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
