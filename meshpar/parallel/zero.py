"""ZeRO: how parameters are split over the batch axes, gathered and reduce-scattered.

The rules say how matmuls take a parameter. What ZeRO splits is split further over batch
axes, along the dim that a rule maps to them, or else the largest that divides.

Collectives run inside `jax.shard_map`, manual over the batch axes. For a weight of `P`
values on `n` devices, a gather brings each device the P (n-1)/n values that it lacks,
in the compute dtype; the reduce-scatter of its gradient sends as many, in fp32 by
default.
Reference: Rajbhandari et al. 2020, sections 5 and 7; Zhao et al. 2023.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.collectives import asked, on_parts
from meshpar.layout import MANUAL_AXES, ZERO_AXES, Layout
from meshpar.model.contract import Model
from meshpar.model.parameter import Parameter
from meshpar.rules.rules import Rules, entry_axes, spec_axes
from meshpar.rules.sharding import path_name
from meshpar.rules.spatial import SPATIAL

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


def stored_parameters(
    model: Model,
    layout: Layout,
    rules: Rules,
    *,
    compute_dtype: Any,
    gradient_dtype: Any,
    sum_dtype: Any,
    scatter_columns: int = 1,
    loop_axes: tuple[str, ...] = (),
) -> Any:
    """Return the tree of `Stored` of a model's parameters.

    Args:
        model: The model.
        layout: Sizes of the mesh axes, and ZeRO.
        rules: Logical axis -> mesh axes; their part for stored parameters applies.
        compute_dtype: As in `Stored`.
        gradient_dtype: As in `Stored`.
        sum_dtype: As in `Stored`.
        scatter_columns: As in `Stored`.
        loop_axes: Batch axes that a layer's parameters and gradients cross beside other
            layers; empty if they cross them before and after all layers.

    Raises:
        RuleError: A parameter cannot be laid out; its path is in the message.
    """

    def place(path: tuple, parameter: Parameter) -> Stored:
        specs = parameter_specs(
            path_name(path), parameter, layout, rules, ahead=bool(loop_axes)
        )
        sums = [axis for axis in loop_axes if axis not in spec_axes(specs["spec"])]
        after = _moved(specs["spec"], specs["gradient_spec"])
        # Complex numbers have no half precision.
        own = None if jnp.issubdtype(parameter.dtype, jnp.floating) else parameter.dtype
        used = jnp.float32 if parameter.in_full else compute_dtype
        return Stored(
            **specs,
            compute_dtype=own or used,
            gradient_dtype=own or gradient_dtype,
            sum_dtype=own or sum_dtype,
            scatter_columns=scatter_columns,
            loop_sums=() if after else tuple(sums),
        )

    return jax.tree.map_with_path(place, model.parameters)


def parameter_specs(
    path: str,
    parameter: Parameter,
    layout: Layout,
    rules: Rules,
    *,
    ahead: bool = False,
) -> dict[str, PartitionSpec]:
    """Return each spec of `Stored` of one parameter, by name.

    Args:
        path: Of the parameter.
        parameter: The parameter.
        layout: Sizes of the mesh axes, and ZeRO.
        rules: Logical axis -> mesh axes.
        ahead: Whether each layer crosses the batch axes beside another.

    Raises:
        RuleError: The parameter cannot be laid out.
    """
    whole = whole_spec(path, parameter, layout, rules)
    split = _split(whole, parameter, layout, rules)
    # Blocks take their parameters layer by layer: layers are split at rest only.
    by_layer = parameter.num_layers is None or split[0] == whole[0]
    once = layout.runs_in_ticks and layout.fsdp_gather == "step"
    layerwise = (layout.zero == 3 and not once or ahead) and by_layer
    return {
        "spec": split,
        "used_spec": whole,
        "loop_spec": split if layerwise and parameter.num_layers else whole,
        "gradient_spec": split
        if layerwise or (layout.zero == 2 and by_layer)
        else whole,
    }


def whole_spec(
    path: str, parameter: Parameter, layout: Layout, rules: Rules
) -> PartitionSpec:
    """Return the spec of a parameter in matmuls, or of an array of a model's state.

    Raises:
        RuleError: The array cannot be laid out.
    """
    return _without_zero_axes(rules).spec(
        parameter.stacked_axes,
        parameter.stacked_shape,
        mesh_shape=layout.mesh_shape,
        path=path,
    )


def _without_zero_axes(rules: Rules) -> Rules:
    stored = rules.stored
    table = {
        logical_axis: tuple(
            axis
            for axis in mesh_axes
            if axis not in zero_axes_in(logical_axis, mesh_axes)
        )
        for logical_axis, mesh_axes in stored.table.items()
    }
    return replace(stored, table=table)


def zero_axes_in(logical_axis: str | None, mesh_axes: Sequence[str]) -> tuple[str, ...]:
    """Return the mesh axes of a dim that are for ZeRO; `expert` splits experts."""
    used = ("expert",) if logical_axis == "experts" else ()
    return tuple(axis for axis in mesh_axes if axis in ZERO_AXES and axis not in used)


def _split(
    whole: PartitionSpec, parameter: Parameter, layout: Layout, rules: Rules
) -> PartitionSpec:
    """Return `whole`, split further over the axes of ZeRO if a dim divides."""
    sizes = layout.mesh_shape
    entries = list(whole)
    wanted = zero_split_axes(layout, rules)
    for axes in (wanted, *((axis,) for axis in wanted)):
        taken = {axis for entry in entries for axis in entry_axes(entry)}
        if not axes or taken & set(axes):
            continue
        for dim in _dims(entries, parameter, layout, rules):
            together = (*entry_axes(entries[dim]), *axes)
            degree = math.prod(sizes[axis] for axis in together)
            if parameter.stacked_shape[dim] % degree == 0:
                entries[dim] = together
                break
    return PartitionSpec(*entries)


def _dims(
    entries: Sequence[Any], parameter: Parameter, layout: Layout, rules: Rules
) -> Iterator[int]:
    """Yield the dims that can be split over batch axes, the best first.

    A dim that GSPMD splits cannot, because its shards would interleave. The dim of
    layers can if parameters are whole during a step.
    """
    shape, stacked = parameter.stacked_shape, parameter.num_layers is not None
    free = [
        dim
        for dim, entry in enumerate(entries)
        if entry is None and not (stacked and dim == 0)
    ]
    ruled = [dim for dim in ruled_dims(parameter, rules) if dim in free]
    yield from ruled
    yield from sorted(set(free) - set(ruled), key=lambda dim: (-shape[dim], dim))
    if stacked and layout.zero != 3:
        yield 0


def ruled_dims(parameter: Parameter, rules: Rules) -> list[int]:
    """Return the dims that rules split over batch axes."""
    table = rules.stored.table
    return [
        dim
        for dim, name in enumerate(parameter.stacked_axes)
        if name is not None and zero_axes_in(name, table[name])
    ]


def zero_split_axes(layout: Layout, rules: Rules) -> tuple[str, ...]:
    """Return the mesh axes of size above 1 that optimizer states are split over."""
    chosen = layout.split_axes
    if layout.zero == 3:  # a rule says over which axes, and whether at all
        stored = rules.stored.table
        mapped = {
            axis
            for name, axes in stored.items()
            if name not in ("batch", *SPATIAL)
            for axis in zero_axes_in(name, axes)
        }
        chosen = tuple(axis for axis in ZERO_AXES if axis in mapped)
    return tuple(axis for axis in chosen if layout.mesh_shape[axis] > 1)
