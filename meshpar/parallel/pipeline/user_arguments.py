"""What a user's arguments to `pipeline_value_and_grad` must be."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from meshpar.errors import InputError
from meshpar.layout import BATCH_AXES
from meshpar.parallel.pipeline.ends import STAGE


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes that split the batch."""
    return tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names)


def check_mesh(mesh: Mesh) -> None:
    """Refuses a mesh that a pipeline cannot run on.

    Raises:
        InputError: It has no `stage`, or a mesh axis that is not `Auto`.
    """
    if STAGE not in mesh.axis_names:
        raise InputError(
            f"the mesh has {', '.join(map(repr, mesh.axis_names))}, but no mesh axis "
            f"{STAGE!r}; a pipeline's ranks lie along it"
        )
    for mesh_axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if kind != AxisType.Auto:
            raise InputError(
                f"mesh axis {mesh_axis!r} is {kind.name}, but must be Auto; build the "
                "mesh with axis_types=(AxisType.Auto,) * axes, or meshpar.make_mesh"
            )


def layers_of(blocks: Any) -> int:
    """Layers that the blocks' parameters are stacked over.

    Raises:
        InputError: There are none, or not as many in each.
    """
    shapes = {jnp.shape(leaf) for leaf in jax.tree.leaves(blocks)}
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or () in lengths:
        shown = ", ".join(map(str, sorted(shapes))) or "no arrays"
        raise InputError(
            f"block_params have shapes {shown}; stack every parameter over the layers, "
            "as many in each"
        )
    return lengths.pop()[0]


def check_parameters(*trees: Any) -> None:
    """Refuses parameters that can have no gradient.

    Raises:
        InputError: One is of integers.
    """
    for leaf in jax.tree.leaves(trees):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise InputError(
                f"a parameter is {leaf.dtype}{leaf.shape}; parameters get gradients, "
                "so they are floating-point: pass others as inputs or targets"
            )


def check_batch(inputs: Any, targets: Any, mesh: Mesh, num_microbatches: int) -> None:
    """Refuses a batch that cannot be cut into microbatches.

    Raises:
        InputError: Arrays of several lengths, or of one that does not divide over the
            batch axes and the microbatches.
    """
    shapes = {jnp.shape(leaf) for leaf in jax.tree.leaves((inputs, targets))}
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or () in lengths:
        shown = ", ".join(map(str, sorted(shapes))) or "no arrays"
        raise InputError(
            f"inputs and targets have shapes {shown}; each has the example first, as "
            "many in all"
        )
    num_examples = lengths.pop()[0]
    axes = batch_axes(mesh)
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if num_examples % (shards * num_microbatches):
        raise InputError(
            f"inputs have {num_examples} examples, which do not divide over {shards} "
            f"devices of {', '.join(axes) or 'no batch axis'} x "
            f"num_microbatches={num_microbatches}; pad with examples of weight 0, or "
            "take other microbatches"
        )
