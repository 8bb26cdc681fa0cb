"""Space: dims of images and volumes that rules split over mesh axes of GSPMD.

A model names them `depth`, `height` and `width`. For a convolution over a split dim
GSPMD sends each device the rows next to its own (the halo), forward and backward, and
sums the gradient of the kernel; nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshpar.errors import InputError
from meshpar.layout import BATCH_AXES, Layout
from meshpar.model.contract import Model
from meshpar.model.inputs import Input
from meshpar.parallel.parameter_specs import zero_split_axes
from meshpar.rules.rules import Rules, spec_axes
from meshpar.rules.spatial import SPATIAL


def space_axes(model: Model, rules: Rules) -> tuple[str, ...]:
    """Return the mesh axes that rules split the space of a model's inputs over."""
    return _mesh_axes(_input_axes(model), rules)


def _input_axes(model: Model) -> set[str | None]:
    inputs = (model.inputs or {}).values()
    return {name for declared in inputs for name in declared.logical_axes}


def _mesh_axes(names: set[str | None], rules: Rules) -> tuple[str, ...]:
    mesh_axes = (
        mesh_axis
        for name in SPATIAL
        if name in names and name in rules.table
        for mesh_axis in rules.mesh_axes(name)
    )
    return tuple(dict.fromkeys(mesh_axes))


def space_dims(model: Model) -> set[int]:
    """Return the numbers of dims of space of a model's inputs, without 0."""
    counts = {
        sum(name in SPATIAL for name in declared.logical_axes)
        for declared in (model.inputs or {}).values()
    }
    return counts - {0}


def has_space(model: Model) -> bool:
    """Return True if a model reads volumes."""
    return "depth" in _input_axes(model)


def has_pairs(model: Model) -> bool:
    """Return True if a model reads an array of pairs of residues."""
    return "pair_rows" in _input_axes(model)


def space_degree(model: Model, layout: Layout, rules: Rules) -> int:
    """Return the number of devices that share the space of one example."""
    sizes = layout.mesh_shape
    return math.prod(sizes[axis] for axis in space_axes(model, rules))


def splits_tokens(model: Model, layout: Layout, rules: Rules) -> bool:
    """Return True if `context` splits sequences, and not space."""
    return layout.context > 1 and "context" not in space_axes(model, rules)


def space_errors(model: Model, layout: Layout, rules: Rules) -> Iterator[InputError]:
    """Yield the errors of a layout that cannot split the space of a model's inputs."""
    axes, sizes = space_axes(model, rules), layout.mesh_shape
    active = [axis for axis in axes if sizes[axis] > 1]
    if layout.stage > 1:
        yield from _staged_space(model, layout, rules)
    if not active:
        return
    request = _request(layout, active)
    if layout.sync_every > 1:
        yield InputError(
            f"{request}, but sync_every={layout.sync_every} trains replicas that hold "
            "whole examples; set sync_every=1",
            key="layout.replicas_of_split_space",
        )
    if "context" not in active:
        return
    if "context" in zero_split_axes(layout, rules):
        yield InputError(
            f"{request}, so that states cannot be split over 'context' too; leave it "
            "out of zero_axes and of the rules of parameters",
            key="layout.states_split_with_space",
        )
    if layout.attention != Layout().attention:
        yield InputError(
            f"{request}, so that attention={layout.attention} has no sequence to "
            "split; leave it out",
            key="layout.attention_beside_space",
        )
    named = {
        name
        for declared in model.known_inputs.values()
        for name in declared.logical_axes
    }
    sequences = sorted(str(name) for name in named if f"_{name}".endswith("_seq"))
    if sequences:
        yield InputError(
            f"{request}, so that it cannot split {sequences[0]!r} of other inputs too; "
            "map the dims of space to other mesh axes, or set context=1",
            key="layout.space_and_sequences",
        )


def _staged_space(model: Model, layout: Layout, rules: Rules) -> Iterator[InputError]:
    """Yield errors of pipelines that split the space of inputs or streams."""
    streams = [group.stream for group in model.groups]
    names = _input_axes(model) | set(jax.tree.leaves(streams))
    active = [
        axis
        for axis in _mesh_axes(names, rules)
        if layout.mesh_shape[axis] > 1 and axis not in BATCH_AXES
    ]
    if active:
        yield InputError(
            f"{_request(layout, active)}, and stage={layout.stage} the layers: XLA "
            "sends halos by permutes that every device of the mesh must join, but at a "
            "tick other stages run a backward, or nothing; set stage=1, or "
            f"{' and '.join(f'{axis}=1' for axis in active)}",
            key="layout.stages_of_split_space",
        )


def _request(layout: Layout, mesh_axes: list[str]) -> str:
    split = " and ".join(f"{axis}={layout.mesh_shape[axis]}" for axis in mesh_axes)
    return f"layout {str(layout)!r}: {split} split{'s' * (len(mesh_axes) == 1)} space"


def check_space(model: Model, layout: Layout, rules: Rules) -> None:
    """Check that a layout can split the space of a model's inputs.

    Raises:
        InputError: It cannot.
    """
    for error in space_errors(model, layout, rules):
        raise error


def input_spec(
    name: str, declared: Input | None, array: Any, rules: Rules, sizes: Mapping
) -> PartitionSpec:
    """Return the spec of an array of a batch: examples and space are split.

    Args:
        name: Name of the array.
        declared: The model's declaration of it, if there is one.
        array: The array or its shape.
        rules: Logical axis -> mesh axes.
        sizes: Size of each mesh axis.

    Raises:
        RuleError: A dim of space does not divide.
    """
    whole = PartitionSpec(BATCH_AXES)
    if declared is None or len(array.shape) != len(declared.logical_axes):
        return whole
    axes = tuple(
        axis if axis in SPATIAL and axis in rules.table else None
        for axis in declared.logical_axes
    )
    spec = rules.spec(axes, array.shape, mesh_shape=sizes, path=f"batch[{name!r}]")
    return PartitionSpec(BATCH_AXES, *spec[1:]) if spec_axes(spec) else whole
