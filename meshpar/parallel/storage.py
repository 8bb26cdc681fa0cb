"""Where every parameter lies at rest and in a step, by rules and ZeRO stage.

The rules say how matmuls want a parameter. What ZeRO splits is split further over batch
axes, along the dim that a rule maps to them, or else the largest that divides: so one
size that does not divide leaves nothing replicated in silence.
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
from meshpar.parallel.zero import Stored
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
) -> Any:
    """Tree of `Stored` beside a model's parameters.

    Args:
        model: The model.
        layout: Sizes of the mesh axes, and ZeRO.
        rules: Logical axis -> mesh axes; those for stored parameters are taken.
        compute_dtype: As in `Stored`, and so the next two.
        gradient_dtype: In which gradients are kept.
        sum_dtype: In which they are summed over devices.
        scatter_columns: As in `Stored`.

    Raises:
        RuleError: A parameter cannot be laid out; its path is in the message.
    """

    def place(path: tuple, parameter: Parameter) -> Stored:
        specs = parameter_specs(path_name(path), parameter, layout, rules)
        # Complex numbers have no half precision.
        own = None if jnp.issubdtype(parameter.dtype, jnp.floating) else parameter.dtype
        used = jnp.float32 if parameter.in_full else compute_dtype
        return Stored(
            **specs,
            compute_dtype=own or used,
            gradient_dtype=own or gradient_dtype,
            sum_dtype=own or sum_dtype,
            scatter_columns=scatter_columns,
        )

    return jax.tree.map_with_path(place, model.parameters)


def parameter_specs(
    path: str, parameter: Parameter, layout: Layout, rules: Rules
) -> dict[str, PartitionSpec]:
    """Each spec of `Stored` of one parameter, by name.

    Raises:
        RuleError: It cannot be laid out.
    """
    whole = whole_spec(path, parameter, layout, rules)
    split = _split(whole, parameter, layout, rules)
    # Blocks take their parameters layer by layer: layers are split at rest only.
    by_layer = parameter.num_layers is None or split[0] == whole[0]
    once = layout.runs_in_ticks and layout.fsdp_gather == "step"
    layerwise = layout.zero == 3 and not once
    return {
        "spec": split if layout.zero == 3 else whole,
        "used_spec": whole,
        "loop_spec": split if layerwise and parameter.num_layers else whole,
        "gradient_spec": split
        if layerwise or (layout.zero == 2 and by_layer)
        else whole,
        "state_spec": split,
    }


def whole_spec(
    path: str, one: Parameter, layout: Layout, rules: Rules
) -> PartitionSpec:
    """How matmuls want a parameter, and how an array of a model's state lies.

    Raises:
        RuleError: It cannot be laid out.
    """
    return _without_zero_axes(rules).spec(
        one.stacked_axes,
        one.stacked_shape,
        mesh_shape=layout.mesh_shape,
        path=path,
    )


def unsplit_axes(layout: Layout, rules: Rules, spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that ZeRO should split states over which lie as `spec` says."""
    wanted = split_axes_of(layout, rules)
    return tuple(axis for axis in wanted if axis not in spec_axes(spec))


def unsplit_message(
    path: str, parameter: Parameter, layout: Layout, mesh_axes: tuple[str, ...]
) -> str:
    """Why a parameter's states are whole on the devices of some mesh axes."""
    sizes = " and ".join(f"{axis}={layout.mesh_shape[axis]}" for axis in mesh_axes)
    return (
        f"{path}: shape {parameter.stacked_shape} has no dim left that divides over "
        f"{sizes}, so its states are whole on each of those devices; pad a dim, or "
        "take other sizes"
    )


def moved_because(
    parameter: Parameter, layout: Layout, rules: Rules, spec: PartitionSpec
) -> str | None:
    """Why another dim is split over batch axes than a rule says; None if none is."""
    ruled = _ruled_dims(parameter, rules)
    split = [
        dim
        for dim, entry in enumerate(spec)
        if zero_axes_in(parameter.stacked_axes[dim], entry_axes(entry))
    ]
    if not split or set(ruled) & set(split):
        return None
    if ruled:
        return f"{parameter.stacked_axes[ruled[0]]!r} does not divide"
    if layout.zero != 3:  # no rule is for states alone
        return None
    axes = sorted({axis for dim in split for axis in entry_axes(spec[dim])})
    return f"no rule maps one of its dims to {' or '.join(map(repr, axes))}, ZeRO does"


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
    """Those of a dim's mesh axes that ZeRO shares out; experts have `expert` to use."""
    used = ("expert",) if logical_axis == "experts" else ()
    return tuple(axis for axis in mesh_axes if axis in ZERO_AXES and axis not in used)


def _split(
    whole: PartitionSpec, parameter: Parameter, layout: Layout, rules: Rules
) -> PartitionSpec:
    """`whole`, split further over the axes of ZeRO where a dim divides."""
    sizes = layout.mesh_shape
    entries = list(whole)
    wanted = split_axes_of(layout, rules)
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
    """The dims that can be split over batch axes, the best first.

    A dim that GSPMD splits cannot be: its shards would interleave. Layers can where
    parameters are whole in a step.
    """
    shape, stacked = parameter.stacked_shape, parameter.num_layers is not None
    free = [
        dim
        for dim, entry in enumerate(entries)
        if entry is None and not (stacked and dim == 0)
    ]
    ruled = [dim for dim in _ruled_dims(parameter, rules) if dim in free]
    yield from ruled
    yield from sorted(set(free) - set(ruled), key=lambda dim: (-shape[dim], dim))
    if stacked and layout.zero != 3:
        yield 0


def _ruled_dims(parameter: Parameter, rules: Rules) -> list[int]:
    """The dims that rules split over batch axes."""
    table = rules.stored.table
    return [
        dim
        for dim, name in enumerate(parameter.stacked_axes)
        if name is not None and zero_axes_in(name, table[name])
    ]


def split_axes_of(layout: Layout, rules: Rules) -> tuple[str, ...]:
    """The mesh axes at work that states are split over."""
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
