"""What a user's arguments to `pipeline_value_and_grad` must be."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from meshpar.errors import InputError
from meshpar.layout import BATCH_AXES, MANUAL_AXES
from meshpar.parallel.pipeline.ends import STAGE, is_spec
from meshpar.rules.rules import spec_axes


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes that split the batch."""
    return tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names)


def check_mesh(mesh: Mesh) -> None:
    """Refuses a mesh that a pipeline cannot run on.

    Raises:
        InputError: It has no `stage`, or a mesh axis that is not `Auto`.
    """
    if not isinstance(mesh, Mesh):
        raise InputError(
            f"mesh is a {type(mesh).__name__}; give one, such as make_mesh('stage=4')",
            key="mesh.not_a_mesh",
        )
    if STAGE not in mesh.axis_names:
        raise InputError(
            f"the mesh has {', '.join(map(repr, mesh.axis_names))}, but no mesh axis "
            f"{STAGE!r}; a pipeline's ranks lie along it",
            key="mesh.no_stage_axis",
        )
    for mesh_axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if kind != AxisType.Auto:
            raise InputError(
                f"mesh axis {mesh_axis!r} is {kind.name}, but must be Auto; build the "
                "mesh with axis_types=(AxisType.Auto,) * axes, or meshpar.make_mesh",
                key="mesh.axis_not_auto",
            )


def layers_of(blocks: Any) -> int:
    """Layers that the blocks' parameters are stacked over.

    Raises:
        InputError: There are none, or not as many in each.
    """
    stacked = "stack every parameter over the layers, as many in each"
    return _common_length(
        "block_params", blocks, stacked, key="model.wrong_number_of_layers"
    )


def check_parameters(*trees: Any) -> None:
    """Refuses parameters that can have no gradient.

    Raises:
        InputError: One is of integers.
    """
    for leaf in jax.tree.leaves(trees):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise InputError(
                f"a parameter is {leaf.dtype}{leaf.shape}; parameters get gradients, "
                "so they are floating-point: pass others as inputs or targets",
                key="model.integer_parameter",
            )


def check_x_spec(x_spec: Any, mesh: Mesh) -> None:
    """Refuses a layout of x that names other mesh axes than GSPMD partitions over.

    Raises:
        InputError: It is no `PartitionSpec`, nor a tree of them, or names another mesh
            axis.
    """
    for spec in jax.tree.leaves(x_spec, is_leaf=is_spec):
        if not is_spec(spec):
            raise InputError(
                f"x_spec={x_spec!r} is no PartitionSpec, nor a tree of it",
                key="layout.not_a_partition_spec",
            )
        _check_mesh_axes("x_spec", spec, mesh)


def stream_specs_of(x_spec: Any, x: Any) -> Any:
    """A spec of all dims for each array of x, `PartitionSpec()` where it is whole.

    Args:
        x_spec: One spec for every array, or a tree of specs.
        x: Shapes of one microbatch.

    Raises:
        InputError: x holds integers, the specs are of another tree, or one has more
            dims than its array.
    """
    for path, leaf in jax.tree.leaves_with_path(x):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise InputError(
                f"blocks take a floating-point x, but the pipeline's input"
                f"{jax.tree_util.keystr(path)} is {leaf.dtype}{leaf.shape}; give "
                "embed=, which makes it one",
                key="model.integer_pipeline_input",
            )
    specs = x_spec
    if is_spec(x_spec):
        specs = jax.tree.map(lambda _: x_spec, x)
    elif jax.tree.structure(x_spec, is_leaf=is_spec) != jax.tree.structure(x):
        raise InputError(
            f"x_spec={x_spec} is of another tree than x, {jax.tree.map(jnp.shape, x)}; "
            "give one PartitionSpec, or one for each of its arrays",
            key="layout.spec_of_other_tree",
        )
    return jax.tree.map(_whole_spec, specs, x, is_leaf=is_spec)


def _whole_spec(x_spec: PartitionSpec, x: Any) -> PartitionSpec:
    if len(x_spec) > len(x.shape):
        raise InputError(
            f"x_spec={x_spec} has {len(x_spec)} dims, but x of one microbatch has "
            f"shape {x.shape}; give a mesh axis or None for each of its "
            f"{len(x.shape)} dims",
            key="layout.spec_has_more_dims",
        )
    whole = (*x_spec, *(None,) * (len(x.shape) - len(x_spec)))
    return PartitionSpec(*whole) if any(whole) else PartitionSpec()


def check_block_specs(specs: Any, blocks: Any, mesh: Mesh) -> None:
    """Refuses specs that are not those of the blocks' parameters.

    Args:
        specs: Tree of `PartitionSpec` of one layer's parameters, or None.
        blocks: The stacked parameters.
        mesh: The mesh.

    Raises:
        InputError: Another tree, a spec of more dims than its parameter, or of mesh
            axes that GSPMD does not partition over.
    """
    if specs is None:
        return
    found = jax.tree.structure(specs, is_leaf=is_spec)
    wanted = jax.tree.structure(blocks)
    leaves = jax.tree.leaves_with_path(specs, is_leaf=is_spec)
    if found != wanted or not all(is_spec(leaf) for _, leaf in leaves):
        raise InputError(
            f"block_specs is {specs}, but block_params is {wanted}; give the same tree "
            "with a PartitionSpec of one layer for each array",
            key="layout.spec_of_other_tree",
        )
    for (path, spec), value in zip(leaves, jax.tree.leaves(blocks), strict=True):
        name, shape = f"block_specs{jax.tree_util.keystr(path)}", value.shape[1:]
        if len(spec) > len(shape):
            raise InputError(
                f"{name}={spec} has {len(spec)} dims, but one layer's parameter has "
                f"shape {shape}; leave the dim of the layers out",
                key="layout.spec_has_more_dims",
            )
        _check_mesh_axes(name, spec, mesh)


def _check_mesh_axes(name: str, spec: PartitionSpec, mesh: Mesh) -> None:
    known = [axis for axis in mesh.axis_names if axis not in MANUAL_AXES]
    for mesh_axis in spec_axes(spec):
        if mesh_axis not in known:
            raise InputError(
                f"{name}={spec} names mesh axis {mesh_axis!r}, but GSPMD partitions "
                f"over {', '.join(map(repr, known)) or 'no mesh axis'} here; batch and "
                "stages are split without it",
                key="layout.unknown_axis_in_spec",
            )


def token_arrays(
    per_token: bool | tuple[Any, Any], inputs: Any, targets: Any
) -> tuple[Any, Any] | None:
    """Which arrays have tokens in dim 1, as trees of booleans; None if none is asked.

    Raises:
        InputError: `per_token` is neither a boolean nor such a pair of trees.
    """
    if isinstance(per_token, bool):
        if not per_token:
            return None
        return jax.tree.map(lambda array: jnp.ndim(array) > 1, (inputs, targets))

    def spread(has_tokens: Any, tree: Any) -> Any:
        if not isinstance(has_tokens, bool):
            raise TypeError(f"{has_tokens!r} is no boolean")
        return jax.tree.map(lambda _: has_tokens, tree)

    try:
        return jax.tree.map(spread, tuple(per_token), (inputs, targets))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"per_token={per_token!r} is neither a boolean nor a pair of trees of "
            f"booleans for (inputs, targets): {error}",
            key="model.per_token_not_booleans",
        ) from error


def check_batch(inputs: Any, targets: Any, mesh: Mesh, num_microbatches: int) -> None:
    """Refuses a batch that cannot be cut into microbatches.

    Raises:
        InputError: Arrays of several lengths, or of one that does not divide over the
            batch axes and the microbatches.
    """
    rule = "each has the example first, as many in all"
    num_examples = _common_length(
        "inputs and targets", (inputs, targets), rule, key="batch.different_lengths"
    )
    axes = batch_axes(mesh)
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if num_examples % (shards * num_microbatches):
        raise InputError(
            f"inputs have {num_examples} examples, which do not divide over {shards} "
            f"devices of {', '.join(axes) or 'no batch axis'} x "
            f"num_microbatches={num_microbatches}; pad with examples of weight 0, or "
            "take other microbatches",
            key="batch.indivisible",
        )


def _common_length(name: str, tree: Any, rule: str, key: str) -> int:
    """The size of the first dim of all arrays; `key` is of its error."""
    shapes = {jnp.shape(leaf) for leaf in jax.tree.leaves(tree)}
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or () in lengths:
        shown = ", ".join(map(str, sorted(shapes))) or "no arrays"
        raise InputError(f"{name} have shapes {shown}; {rule}", key=key)
    return lengths.pop()[0]
