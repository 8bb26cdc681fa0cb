"""Where every parameter lies at rest and in a step, by rules and ZeRO stage.

The rules say how matmuls want a parameter. What ZeRO splits is split further over batch
axes, along the dim that a rule maps to them, or else the largest that divides: so one
size that does not divide leaves nothing replicated in silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshpar.layout import BATCH_AXES, Layout
from meshpar.model import Model, Parameter, is_parameter, path_name, spec_axes
from meshpar.parallel.zero import Stored
from meshpar.rules import Rules


def stored_parameters(
    model: Model,
    layout: Layout,
    rules: Rules,
    *,
    compute_dtype: Any,
    gradient_dtype: Any,
    sum_dtype: Any,
) -> Any:
    """Tree of `Stored` beside a model's parameters.

    Args:
        model: The model.
        layout: Sizes of the mesh axes, and ZeRO.
        rules: Logical axis -> mesh axes; those for stored parameters are taken.
        compute_dtype: As in `Stored`, and so the next two.
        gradient_dtype: In which gradients are kept.
        sum_dtype: In which they are summed over devices.

    Raises:
        RuleError: A parameter cannot be laid out; its path is in the message.
    """

    def place(path: tuple, parameter: Parameter) -> Stored:
        return Stored(
            **parameter_specs(path_name(path), parameter, layout, rules),
            compute_dtype=compute_dtype,
            gradient_dtype=gradient_dtype,
            sum_dtype=sum_dtype,
        )

    return jax.tree.map_with_path(place, model.parameters, is_leaf=is_parameter)


def parameter_specs(
    path: str, parameter: Parameter, layout: Layout, rules: Rules
) -> dict[str, PartitionSpec]:
    """Each spec of `Stored` of one parameter, by name.

    Raises:
        RuleError: It cannot be laid out.
    """
    sizes = layout.mesh_shape
    whole = _without_batch_axes(rules).spec(
        parameter.stacked_axes,
        parameter.stacked_shape,
        mesh_shape=sizes,
        path=path,
    )
    split = _split(whole, parameter, layout, rules)
    # Blocks take their parameters layer by layer: layers are split at rest only.
    by_layer = parameter.num_layers is None or split[0] == whole[0]
    once = layout.is_pipelined and layout.fsdp_gather == "step"
    layerwise = layout.zero == 3 and not once
    return {
        "spec": split if layout.zero == 3 else whole,
        "loop_spec": split if layerwise else whole,
        "gradient_spec": split
        if layerwise or (layout.zero == 2 and by_layer)
        else whole,
        "state_spec": split,
    }


def unsplit_axes(parameter: Parameter, layout: Layout, spec: PartitionSpec) -> int:
    """Over how many devices ZeRO should have split a parameter and could not."""
    wanted = _at_work(layout.split_axes, layout.mesh_shape)
    left = [axis for axis in wanted if axis not in spec_axes(spec)]
    return math.prod(layout.mesh_shape[axis] for axis in left)


def _without_batch_axes(rules: Rules) -> Rules:
    stored = rules.stored
    table = {
        logical_axis: tuple(axis for axis in mesh_axes if axis not in BATCH_AXES)
        for logical_axis, mesh_axes in stored.table.items()
    }
    return replace(stored, table=table)


def _split(
    whole: PartitionSpec, parameter: Parameter, layout: Layout, rules: Rules
) -> PartitionSpec:
    """`whole`, split further over the axes of ZeRO where a dim divides."""
    sizes = layout.mesh_shape
    mapped = _mapped_axes(rules)
    # With zero=3 a rule says over which axes, and whether at all.
    chosen = mapped if layout.zero == 3 else layout.split_axes
    entries = list(whole)
    wanted = _at_work(chosen, sizes)
    for axes in (wanted, *((axis,) for axis in wanted)):
        left = tuple(axis for axis in axes if axis not in _named(entries))
        if left != axes or not axes:
            continue
        for dim in _dims(entries, parameter, layout, rules):
            degree = math.prod(sizes[axis] for axis in (*_axes(entries[dim]), *axes))
            if parameter.stacked_shape[dim] % degree == 0:
                together = (*_axes(entries[dim]), *axes)
                entries[dim] = together[0] if len(together) == 1 else together
                break
    return PartitionSpec(*entries)


def _dims(
    entries: Sequence[Any], parameter: Parameter, layout: Layout, rules: Rules
) -> Iterator[int]:
    """The dims that can be split over batch axes, the best first.

    A dim that GSPMD splits cannot be: its shards would interleave. Layers can where
    parameters are whole in a step.
    """
    table = rules.stored.table
    names, shape = parameter.stacked_axes, parameter.stacked_shape
    stacked = parameter.num_layers is not None
    free = [
        dim
        for dim, entry in enumerate(entries)
        if entry is None and not (stacked and dim == 0)
    ]
    ruled = [
        dim
        for dim in free
        if names[dim] is not None and set(table[names[dim]]) & set(BATCH_AXES)
    ]
    yield from ruled
    yield from sorted(set(free) - set(ruled), key=lambda dim: (-shape[dim], dim))
    if stacked and layout.zero != 3:
        yield 0


def _mapped_axes(rules: Rules) -> tuple[str, ...]:
    """The batch axes that rules split stored parameters over."""
    mapped = {
        axis
        for logical_axis, mesh_axes in rules.stored.table.items()
        if logical_axis != "batch"
        for axis in mesh_axes
    }
    return tuple(axis for axis in BATCH_AXES if axis in mapped)


def _at_work(mesh_axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(axis for axis in mesh_axes if sizes[axis] > 1)


def _named(entries: Sequence[Any]) -> tuple[str, ...]:
    return spec_axes(PartitionSpec(*entries))


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()
