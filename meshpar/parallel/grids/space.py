"""Space: dims of images and volumes that rules split over mesh axes left to GSPMD.

A model names them `depth`, `height` and `width`. Of a convolution over a split dim
GSPMD sends each device the rows next to its own (the halo), forward and backward, and
adds up the gradient of the kernel; nothing is gathered.
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
from meshpar.parallel.zero import zero_split_axes
from meshpar.rules.rules import Rules, spec_axes
from meshpar.rules.spatial import SPATIAL


def space_axes(model: Model, rules: Rules) -> tuple[str, ...]:
    """The mesh axes that rules split the space of a model's inputs over."""
    return _axes_of(_input_axes(model), rules)


def _input_axes(model: Model) -> set[str | None]:
    inputs = (model.inputs or {}).values()
    return {name for one in inputs for name in one.logical_axes}


def _axes_of(names: set[str | None], rules: Rules) -> tuple[str, ...]:
    found = (
        mesh_axis
        for name in SPATIAL
        if name in names and name in rules.table
        for mesh_axis in rules.mesh_axes(name)
    )
    return tuple(dict.fromkeys(found))


def space_dims(model: Model) -> set[int]:
    """How many dims of space each of a model's inputs has, of those that have any."""
    inputs = (model.inputs or {}).values()
    counts = {sum(name in SPATIAL for name in one.logical_axes) for one in inputs}
    return counts - {0}


def has_space(model: Model) -> bool:
    """Whether a model reads volumes: what it computes grows with their places."""
    return "depth" in _input_axes(model)


def has_pairs(model: Model) -> bool:
    """Whether a model reads an array of all pairs of its places."""
    return "pair_rows" in _input_axes(model)


def space_degree(model: Model, layout: Layout, rules: Rules) -> int:
    """Devices that share the space of one example."""
    sizes = layout.mesh_shape
    return math.prod(sizes[axis] for axis in space_axes(model, rules))


def splits_tokens(model: Model, layout: Layout, rules: Rules) -> bool:
    """Whether `context` splits sequences: it does where it does not split space."""
    return layout.context > 1 and "context" not in space_axes(model, rules)


def space_errors(model: Model, layout: Layout, rules: Rules) -> Iterator[InputError]:
    """Yield the errors of a layout that cannot split the space of a model's inputs."""
    axes, sizes = space_axes(model, rules), layout.mesh_shape
    at_work = [axis for axis in axes if sizes[axis] > 1]
    if layout.stage > 1:
        yield from _staged_space(model, layout, rules)
    if not at_work:
        return
    asked = _asked(layout, at_work)
    if layout.sync_every > 1:
        yield InputError(
            f"{asked}, but sync_every={layout.sync_every} trains replicas that hold "
            "whole examples; set sync_every=1",
            key="layout.replicas_of_split_space",
        )
    if "context" not in at_work:
        return
    if "context" in zero_split_axes(layout, rules):
        yield InputError(
            f"{asked}, so that states cannot be split over 'context' too; leave it "
            "out of zero_axes and of the rules of parameters",
            key="layout.states_split_with_space",
        )
    if layout.attention != Layout().attention:
        yield InputError(
            f"{asked}, so that attention={layout.attention} has no sequence to split; "
            "leave it out",
            key="layout.attention_beside_space",
        )
    named = {name for one in model.known_inputs.values() for name in one.logical_axes}
    sequences = sorted(str(name) for name in named if f"_{name}".endswith("_seq"))
    if sequences:
        yield InputError(
            f"{asked}, so that it cannot split {sequences[0]!r} of other inputs too; "
            "map the dims of space to other mesh axes, or set context=1",
            key="layout.space_and_sequences",
        )


def _staged_space(model: Model, layout: Layout, rules: Rules) -> Iterator[InputError]:
    """Of the inputs' space and of that of the streams between blocks."""
    streams = [group.stream for group in model.groups]
    names = _input_axes(model) | set(jax.tree.leaves(streams))
    at_work = [
        axis
        for axis in _axes_of(names, rules)
        if layout.mesh_shape[axis] > 1 and axis not in BATCH_AXES
    ]
    if at_work:
        yield InputError(
            f"{_asked(layout, at_work)}, and stage={layout.stage} the layers: XLA "
            "sends halos by permutes that every device of the mesh must join, but at a "
            "tick other stages run a backward, or nothing; set stage=1, or "
            f"{' and '.join(f'{one}=1' for one in at_work)}",
            key="layout.stages_of_split_space",
        )


def _asked(layout: Layout, at_work: list[str]) -> str:
    split = " and ".join(f"{axis}={layout.mesh_shape[axis]}" for axis in at_work)
    return f"layout {str(layout)!r}: {split} split{'s' * (len(at_work) == 1)} space"


def check_space(model: Model, layout: Layout, rules: Rules) -> None:
    """Refuses a layout that cannot split the space of a model's inputs.

    Raises:
        InputError: It has what cannot stand beside.
    """
    for error in space_errors(model, layout, rules):
        raise error


def input_spec(
    name: str, declared: Input | None, array: Any, rules: Rules, sizes: Mapping
) -> PartitionSpec:
    """How an array of a batch lies: its examples split, and its space.

    Args:
        name: Of the array.
        declared: What the model says of it; None where it says nothing.
        array: It or its shape.
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
