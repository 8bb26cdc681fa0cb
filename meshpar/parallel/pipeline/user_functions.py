"""A user's own block, embedding and head, as the pipeline's core calls them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from meshpar.errors import InputError
from meshpar.layout import BATCH_AXES, MANUAL_AXES
from meshpar.machine.mesh import device_kinds, mesh_platform
from meshpar.model.block_run import HeadSums
from meshpar.model.contract import BlockGroup, Stream
from meshpar.parallel.blocks import Block, ScopeArrays
from meshpar.parallel.pipeline.crossing import STAGE, Shares, is_spec
from meshpar.parallel.pipeline.rank_layers import mesh_hindrance
from meshpar.parallel.pipeline.seams import Enter
from meshpar.parallel.pipeline.stages import Arrangement
from meshpar.parallel.zero import Stored
from meshpar.rules.rules import spec_axes
from meshpar.schedules import Schedule


class At(NamedTuple):
    """Where a block runs.

    Args:
        layer: Index of its layer, int32.
        microbatch: Index of the microbatch within this device's part of the batch.
        inputs: That microbatch of the pipeline's input, without gradient.
    """

    layer: jax.Array
    microbatch: jax.Array
    inputs: Any


@dataclass(frozen=True, kw_only=True)
class UserFunctions:
    """`Functions` of the pipeline's core, from the user's block, head and embed.

    Args:
        block: `(layer_params, x)`, or `(layer_params, x, at)` with an `At`, -> x.
        head: `(end_params, x, targets)` -> `(loss_sum, weight_sum)` or a mean.
        embed_inputs: `(end_params, inputs)` -> x; None where the input is x itself.
        mesh: The mesh.
        schedule: What every rank does.
        num_layers: Layers of all stages.
        token_arrays: Which arrays of inputs and targets have tokens in dim 1, where
            embed and head treat every token by itself; None where they do not.
        auxiliary: Name of each auxiliary loss of the blocks -> its coefficient.
        remat: What the backward recomputes (`Layout.remat`).
        x_spec: How x lies over automatic mesh axes, or a tree of that.
        divergent: Whether each rank does an action of its own in a tick.
        block_stored: Tree of `Stored` of the blocks, stacked.
        end_stored: Tree of `Stored` of the ends.
    """

    block: Callable[..., Any]
    head_sums: Callable[..., Any]
    embed_inputs: Callable[[Any, Any], Stream] | None
    mesh: Mesh
    schedule: Schedule
    num_layers: int
    token_arrays: tuple[Any, Any] | None
    auxiliary: dict[str, float]
    remat: str
    x_spec: Any
    divergent: bool
    paired_group: None = None
    block_stored: Any
    end_stored: Any

    @property
    def group(self) -> BlockGroup:
        """The blocks under the model's contract."""
        return block_group(self.block, self.num_layers, self.auxiliary)

    @property
    def platform(self) -> str:
        """Kind of device of the mesh."""
        return mesh_platform(self.mesh)

    @property
    def keeps_together(self) -> str | None:
        """Why idle ranks compute on zeros, or None (`mesh_hindrance`)."""
        return mesh_hindrance(self.mesh.shape, self.platform, device_kinds(self.mesh))

    def embed(self, weights: Any, arrays: ScopeArrays, shares: Shares | None) -> Stream:
        """Return the first block's input, of a share."""
        inputs = self._share(arrays.batch["inputs"], 0, "inputs", shares)
        return (
            inputs if self.embed_inputs is None else self.embed_inputs(weights, inputs)
        )

    def head(
        self, weights: Any, stream: Stream, arrays: ScopeArrays, shares: Shares
    ) -> HeadSums:
        """Return summed loss and summed weights of a share, fp32.

        Raises:
            InputError: The head returns neither two scalars nor one.
        """
        targets = self._share(arrays.batch["targets"], 1, "targets", shares)
        found = self.head_sums(weights, stream, targets)
        pair = tuple(found) if isinstance(found, tuple | list) else (found,)
        shapes = [jnp.shape(value) for value in pair]
        if shapes not in ([()], [(), ()]):
            raise InputError(
                f"head returns arrays of shapes {shapes}; it must return a scalar, the "
                "mean loss, or two: the sum of the loss and the sum of its weights",
                key="model.head_not_scalars",
            )
        if len(pair) == 1:
            num_shares = 1 if shares.dim is None else shares.num_ranks
            pair = (pair[0] / num_shares, 1 / num_shares)
        loss_sum, weight_sum = (jnp.asarray(value, jnp.float32) for value in pair)
        return HeadSums(loss_sum, weight_sum, {})

    def blocks(self, arrangement: Arrangement) -> Sequence[Block]:
        """Return the only group's layer; its scope is an `At`."""

        def place(arrays: ScopeArrays) -> At:
            layer = jnp.maximum(cast(Any, arrays.layer), 0)
            return At(layer, cast(Any, arrays.microbatch), arrays.batch["inputs"])

        stored = jax.tree.map(Stored.without_layers, self.block_stored)
        return [
            Block(
                self.group,
                stored=stored,
                remat=self.remat,
                make_scope=place,
                padded=arrangement.padded(0),
            )
        ]

    def enters(self) -> Sequence[Enter | None]:
        """Return [None]: there is one group."""
        return [None]

    def specs(self, group: int, stream: Stream) -> Any:
        """Return `x_spec`, a whole spec for each array of x.

        Raises:
            InputError: It is of another tree or more dims than x, or x holds integers.
        """
        return whole_specs(self.x_spec, stream)

    def shared_dims(self, *, of_embed: bool) -> tuple[int, ...]:
        """Return the dims to share: tokens if the user says so, else none."""
        is_x = of_embed and self.embed_inputs is None  # on every rank anyway
        return () if self.token_arrays is None or is_x else (1,)

    def differentiated(self, arrays: ScopeArrays) -> Any:
        """Return the inputs."""
        return arrays.batch["inputs"]

    def with_differentiated(self, arrays: ScopeArrays, part: Any) -> ScopeArrays:
        """Return a microbatch with other inputs."""
        return arrays._replace(batch={**arrays.batch, "inputs": part})

    def scatter_ends(self, gradients: Any) -> Any:
        """Return them as they are: whole on every device."""
        return gradients

    def _share(self, tree: Any, argument: int, name: str, shares: Shares | None) -> Any:
        if shares is None or shares.dim is None or self.token_arrays is None:
            return tree
        return jax.tree.map_with_path(
            lambda path, array, has_tokens: (
                shares.own_part(array, 1, name + jax.tree_util.keystr(path))
                if has_tokens
                else array
            ),
            tree,
            self.token_arrays[argument],
        )


def block_group(
    block: Callable[..., Any], num_layers: int, auxiliary: dict[str, float]
) -> BlockGroup:
    """Return the block under the model's contract, its scope an `At`."""
    wanted = [
        parameter
        for parameter in inspect.signature(block).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]

    def without_place(params: Any, x: jax.Array, _: Any) -> Any:
        return block(params, x)

    return BlockGroup(
        name="blocks",
        num_layers=num_layers,
        block=block if len(wanted) > 2 else without_place,
        auxiliary=auxiliary,
    )


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes that split the batch."""
    return tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names)


def check_mesh(mesh: Mesh) -> None:
    """Refuse a mesh that a pipeline cannot run on.

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


def stacked_layers(blocks: Any) -> int:
    """Return the number of layers that the blocks' parameters are stacked over.

    Raises:
        InputError: There are none, or not as many in each.
    """
    stacked = "stack every parameter over the layers, as many in each"
    return _common_length(
        "block_params", blocks, stacked, key="model.wrong_number_of_layers"
    )


def check_parameters(*trees: Any) -> None:
    """Refuse parameters that can have no gradient.

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
    """Refuse a layout of x that names other mesh axes than GSPMD partitions over.

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


def whole_specs(x_spec: Any, x: Any) -> Any:
    """Return a spec of all dims for each array of x, `PartitionSpec()` if whole.

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
    """Refuse specs that are not those of the blocks' parameters.

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
    """Return trees of booleans: True for arrays with tokens in dim 1; None if unset.

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
    """Refuse a batch that cannot be cut into microbatches.

    Raises:
        InputError: Arrays of several lengths, or of one that does not divide over the
            batch axes and the microbatches.
    """
    rule = "the first dim of each is the examples, as many in all"
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
    """Return the first dim's size, common to all arrays; `key` is of its error."""
    shapes = {jnp.shape(leaf) for leaf in jax.tree.leaves(tree)}
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or () in lengths:
        shown = ", ".join(map(str, sorted(shapes))) or "no arrays"
        raise InputError(f"{name} have shapes {shown}; {rule}", key=key)
    return lengths.pop()[0]
