"""Specs of parameters: how matmuls take each one, and how ZeRO splits it further.

The rules say how matmuls take a parameter. What ZeRO splits is split further over batch
axes, along the dim that a rule maps to them, or else the largest that divides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.layout import ZERO_AXES, Layout
from meshpar.model.contract import Model
from meshpar.model.parameter import Parameter
from meshpar.parallel.zero import Stored, gradient_after_loop
from meshpar.rules.rules import Rules, entry_axes, spec_axes
from meshpar.rules.sharding import path_name
from meshpar.rules.spatial import SPATIAL


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
        # Complex numbers have no half precision.
        own = None if jnp.issubdtype(parameter.dtype, jnp.floating) else parameter.dtype
        used = jnp.float32 if parameter.in_full else compute_dtype
        stored = Stored(
            **specs,
            compute_dtype=own or used,
            gradient_dtype=own or gradient_dtype,
            sum_dtype=own or sum_dtype,
            scatter_columns=scatter_columns,
            loop_sums=tuple(sums),
        )
        # A gradient that is scattered after the loop is summed there too.
        return replace(stored, loop_sums=()) if gradient_after_loop(stored) else stored

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
