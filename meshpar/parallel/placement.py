"""A model's parameters on a mesh: stored, gathered and reduced, per device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshpar.collectives import asked, sum_dtype
from meshpar.errors import InputError
from meshpar.layout import BATCH_AXES, MANUAL_AXES, TOKEN_AXES, Layout
from meshpar.model.contract import RESIDUAL, Model, Stream
from meshpar.model.inputs import Batch
from meshpar.model.parameter import Params
from meshpar.model.scope import Scope
from meshpar.model.token_order import TokenOrder
from meshpar.parallel.grids.space import input_spec, space_degree, splits_tokens
from meshpar.parallel.reduction import reduce_gradients, sum_by_host
from meshpar.parallel.tensor import shard_index
from meshpar.parallel.zero import (
    Stored,
    after_update,
    before_loop,
    gather,
    gather_shards,
    gradient_after_loop,
    gradient_in_loop,
    in_loop,
    manual_spec,
    reduce_scatter,
    stored_parameters,
    whole_spec,
)
from meshpar.rules.rules import Rules, auto_mesh_shape, is_axes
from meshpar.rules.sharding import path_name

BATCH = PartitionSpec(BATCH_AXES)
REPLICATED = PartitionSpec()
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
PARAM_DTYPES = {**DTYPES, "bf16_stochastic": jnp.bfloat16}
"""What parameters are stored in, by the layout's `param_dtype`."""

_TPU_COLUMNS = 2048
"""A multiple of so many XLA:TPU scattered in every case that was tried."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What the programs of a model share; its methods are called inside `on_shards`.

    Args:
        model: The model.
        layout: Sizes, remat and precision.
        rules: Logical axis -> mesh axes.
        mesh: The mesh, set with `use_mesh` around every call; an `AbstractMesh` where
            the devices are absent.
        platform: Kind of device: `cpu`, `gpu` or `tpu`.
        gradient_dtype: In which gradients are added up over microbatches and devices.
        apart: Mesh axes along which each device trains a replica of its own: nothing is
            summed over them (`meshpar.train.local_steps`).
        hosts: The host of each device of the mesh, row by row, where gradients are
            summed inside hosts first (`meshpar.parallel.reduction`).
    """

    model: Model
    layout: Layout
    rules: Rules
    mesh: Mesh | AbstractMesh
    platform: str
    gradient_dtype: Any = jnp.float32
    apart: tuple[str, ...] = ()
    hosts: tuple[int, ...] | None = None

    def on_shards(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`local` of this device's part over the manual mesh axes."""
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.manual_axes),
            check_vma=False,
        )

    def on_state(self, local: Callable, out_specs: Any) -> Callable:
        """`local` of this device's part of (params, model state, batch, step, seed)."""
        of_state = self.manual_specs, self.manual_model_state_specs
        in_specs = (*of_state, BATCH, REPLICATED, REPLICATED)
        return self.on_shards(local, in_specs, out_specs)

    def on_training_state(self, local: Callable) -> Callable:
        """`local` as in `on_state`, giving what `found_specs` lists.

        Of replicas apart all of these have a leading dim of all of them, and so have
        the parameters and the state that it takes.
        """
        found = self.found_specs
        if not self.apart:
            return self.on_state(local, found)

        def of_replica(params: Params, state: Params, *others: Any) -> Any:
            own = jax.tree.map(lambda x: x[0], (params, state))
            return jax.tree.map(lambda x: x[None], local(*own, *others))

        params, state, *out_specs = map(
            self.of_replicas, (self.manual_specs, self.manual_model_state_specs, *found)
        )
        in_specs = params, state, BATCH, REPLICATED, REPLICATED
        return self.on_shards(of_replica, in_specs, tuple(out_specs))

    @property
    def found_specs(self) -> tuple[Any, ...]:
        """Specs of loss, metrics, gradients, model state and inputs' gradients."""
        of_state = self.manual_model_state_specs
        return REPLICATED, REPLICATED, self.manual_state_specs, of_state, BATCH

    def of_replicas(self, specs: Any) -> Any:
        """Specs of arrays with a leading dim of all replicas apart."""
        return jax.tree.map(lambda spec: PartitionSpec(self.apart, *spec), specs)

    def scopes(self, *, training: bool, order: TokenOrder | None = None) -> Scopes:
        """What makes the scopes of a model's functions.

        Args:
            training: Whether a training step runs.
            order: Which tokens a device has; None where it has whole sequences.
        """
        return Scopes(
            order=order,
            rules=self.rules,
            platform=self.platform,
            batch_axes=self.large(BATCH_AXES),
            replica_axes=self.apart,
            num_microbatches=self.layout.microbatches,
            training=training,
        )

    def gather_before_loop(self, params: Params) -> tuple[Params, list[Params]]:
        """The ends' parameters for use, and the blocks' as the loop takes them.

        One all-gather over the batch axes for each parameter of the ends that is split
        there, and for each stacked one where the step gathers once
        (`fsdp_gather=step`): a device receives the P (n-1)/n of its P values that it
        lacks, in the compute dtype.

        Args:
            params: This device's shards, at rest.

        Returns:
            The ends' parameters, whole over the batch axes; of each group of blocks the
            (layers, ...) of this device's stages, split as `Stored.loop_spec` says.
        """
        ends, _ = self.model.split(params)
        stored, _ = self.model.split(self.stored)
        return gather(stored, ends, before_loop), self.blocks_before_loop(params)

    def blocks_before_loop(self, params: Params) -> list[Params]:
        """The blocks' parameters as the loop takes them (`gather_before_loop`)."""
        _, groups = self.model.split(params)
        if not any(map(before_loop, jax.tree.leaves(self.stored))):
            return groups
        return gather(self.model.split(self.stored)[1], groups, before_loop)

    def at_rest(self, values: Params) -> Params:
        """Parameters as they lie between steps, from shards laid out as states.

        Args:
            values: Global arrays in their dtype at rest.
        """
        if not any(map(after_update, jax.tree.leaves(self.stored))):
            return values

        def local(values: Params) -> Params:
            return gather_shards(self.stored, values, after_update)

        return self.on_shards(local, (self.manual_state_specs,), self.manual_specs)(
            values
        )

    def scatter_ends(self, gradients: Params) -> Params:
        """The ends' gradients as they are added up.

        One reduce-scatter over the batch axes for each that is split while it is added
        up (`zero=2` and `3`): of P values each device sends P (n-1)/n, in
        `Stored.sum_dtype`. The others stay this device's own, until `reduce`.

        Args:
            gradients: Shaped as the ends' parameters for use.
        """
        return reduce_scatter(
            self.model.split(self.stored)[0], gradients, gradient_in_loop
        )

    def gradient_shapes(
        self, weights: Params, groups: list[Params]
    ) -> tuple[Params, list[Params]]:
        """Local shapes of gradients while a step adds them up.

        Args:
            weights: The ends' parameters for use.
            groups: The blocks' as the loop takes them.
        """

        def shape(stored: Stored, shard: jax.Array) -> jax.ShapeDtypeStruct:
            dims = list(shard.shape)
            for dim, axes in in_loop(stored):
                dims[dim] *= self._degree(axes)
            for dim, axes in gradient_in_loop(stored):
                dims[dim] //= self._degree(axes)
            return jax.ShapeDtypeStruct(tuple(dims), stored.gradient_dtype)

        tree = self.model.join(weights, groups)
        shapes = jax.tree.map(shape, self.stored, tree)
        return self.model.split(shapes)

    def reduce(
        self,
        end_gradients: Params,
        group_gradients: list[Params],
    ) -> Params:
        """Gradients summed over the batch axes and `stage`, laid out as states.

        Each gradient crosses each mesh axis once, after the loop. Over the batch axes
        that its state is split over, and it itself was not yet: one reduce-scatter for
        each gradient, of P values a device sends P (n-1)/n. Over the other batch axes,
        and `stage` for the ends: one all-reduce of all such gradients, 2 P (n-1)/n.

        Args:
            end_gradients: Of the ends, from `scatter_ends`.
            group_gradients: Of each group of blocks, as the loop adds them up.
        """
        gradients = self.model.join(end_gradients, group_gradients)
        scattered = reduce_scatter(self.stored, gradients, gradient_after_loop)
        axes = self.large(self.manual_axes)
        summed = reduce_gradients(self.stored, scattered, axes, **self.sum_options)
        return jax.tree.map(
            lambda stored, x: x.astype(stored.gradient_dtype), self.stored, summed
        )

    @property
    def sum_options(self) -> dict[str, Any]:
        """How `reduce_gradients` sums what it does not scatter."""
        if self.hosts is None:
            return {}
        hosts = np.array(self.hosts).reshape(list(self.mesh.shape.values()))
        return {"sum_over": functools.partial(sum_by_host, hosts)}

    def sum_losses(self, values: Any, mesh_axes: tuple[str, ...] = TOKEN_AXES) -> Any:
        """Loss and weights summed over what splits tokens, or over more mesh axes."""
        axes = self.large(mesh_axes)
        if not axes:
            return values
        with asked("loss_sum"):
            return lax.psum(values, axes)

    def large(self, mesh_axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of some mesh axes whose size is above 1, without `apart`.

        Without `context` too where it splits space: GSPMD adds up over it.
        """
        absent = self.apart if self.splits_tokens else (*self.apart, "context")
        return tuple(
            axis
            for axis in mesh_axes
            if self.mesh.shape[axis] > 1 and axis not in absent
        )

    def batch_sharding(self, name: str, array: Any) -> NamedSharding:
        """How an array of a batch lies: its examples split, and its space.

        Raises:
            RuleError: A dim of space does not divide.
        """
        declared = (self.model.inputs or {}).get(name)
        sizes = self.layout.mesh_shape
        spec = input_spec(name, declared, array, self.rules, sizes)
        return NamedSharding(self.mesh, spec)

    @property
    def splits_space(self) -> bool:
        """Whether several devices share the space of an example."""
        return space_degree(self.model, self.layout, self.rules) > 1

    @property
    def splits_tokens(self) -> bool:
        """Whether `context` splits sequences, each device its own tokens."""
        return splits_tokens(self.model, self.layout, self.rules)

    @property
    def manual_axes(self) -> tuple[str, ...]:
        """The mesh axes that `on_shards` makes manual."""
        stage, context = self.layout.runs_in_ticks, self.splits_tokens
        absent = {"stage": not stage, "context": not context}
        return tuple(axis for axis in MANUAL_AXES if not absent.get(axis, False))

    @property
    def compute_dtype(self) -> Any:
        """The dtype that blocks compute in."""
        return DTYPES[self.layout.precision]

    @cached_property
    def stored(self) -> Any:
        """Tree of `Stored`, beside the parameters."""
        return stored_parameters(
            self.model,
            self.layout,
            self.rules,
            compute_dtype=self.compute_dtype,
            gradient_dtype=self.gradient_dtype,
            sum_dtype=sum_dtype(self.gradient_dtype, self.platform),
            scatter_columns=_TPU_COLUMNS if self.platform == "tpu" else 1,
        )

    @cached_property
    def manual_specs(self) -> Any:
        """Specs of the parameters at rest over the manual mesh axes."""
        return self.specs(lambda stored: manual_spec(stored.spec))

    @cached_property
    def manual_state_specs(self) -> Any:
        """Specs of gradients and optimizer states over the manual mesh axes."""
        return self.specs(lambda stored: manual_spec(stored.state_spec))

    @cached_property
    def model_state_specs(self) -> Any:
        """Specs of the model's own state: whole over the batch axes."""
        return jax.tree.map_with_path(
            lambda path, one: whole_spec(path_name(path), one, self.layout, self.rules),
            self.model.state,
        )

    @cached_property
    def manual_model_state_specs(self) -> Any:
        """Those over the manual mesh axes."""
        return jax.tree.map(manual_spec, self.model_state_specs)

    def specs(self, of: Callable[[Stored], PartitionSpec]) -> Any:
        """A spec for every parameter."""
        return jax.tree.map(of, self.stored)

    def _degree(self, mesh_axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in mesh_axes)


@dataclass(frozen=True, kw_only=True)
class Scopes:
    """Makes scopes, inside `jax.shard_map` over the manual mesh axes.

    Args:
        rules: Logical axis -> mesh axes.
        platform: Kind of device.
        batch_axes: Mesh axes of size above 1 that split the batch.
        replica_axes: Mesh axes outside them that do too, for a replica each.
        num_microbatches: Parts that a device's share of the batch is run in.
        training: Whether a training step runs.
        order: Which tokens this device has; None where it has whole sequences.
    """

    rules: Rules
    platform: str
    batch_axes: tuple[str, ...]
    num_microbatches: int = 1
    training: bool = True
    order: TokenOrder | None = None
    replica_axes: tuple[str, ...] = ()

    def __call__(self, known: Mapping[str, Any], **shared: Any) -> Scope:
        """The scope that `known` arrays make; `shared` has what ranks share."""
        return Scope(
            rules=self.rules,
            batch=Batch(known["batch"]),
            layer=known.get("layer", -1),
            state=known.get("state", {}),
            examples=known["examples"],
            random=known["random"],
            training=self.training,
            batch_axes=shared.pop("batch_axes", self.batch_axes),
            num_microbatches=self.num_microbatches,
            platform=self.platform,
            order=self.order,
            cache=known.get("cache"),
            **shared,
        )

    def examples(self, batch: Any) -> jax.Array:
        """The index in the global batch of each of this device's examples, uint32."""
        rows = jax.tree.leaves(batch)[0].shape[0]
        first = shard_index((*self.replica_axes, *self.batch_axes)) * rows
        return (first + jnp.arange(rows)).astype(jnp.uint32)


def stream_specs(axes: Any, stream: Stream, rules: Rules) -> Any:
    """How a group's stream lies over automatic mesh axes: a spec for each array.

    Of an array that nothing is said of it is empty, of others as long as its dims.

    Args:
        axes: Tree of logical axes (`BlockGroup.stream`), or None.
        stream: The arrays or their shapes, this device's examples.
        rules: Logical axis -> mesh axes.

    Raises:
        InputError: The stream is not the declared tree.
        RuleError: An array of it cannot be laid out.
    """
    _check_real(stream)
    if axes is None:
        return jax.tree.map(lambda x: _spec(_default(x, rules), x, rules), stream)
    declared = jax.tree.structure(axes, is_leaf=is_axes)
    if declared != jax.tree.structure(stream):
        raise InputError(
            f"the stream is declared as {axes}, but the functions make "
            f"{jax.tree.map(jnp.shape, stream)}; declare a tuple of logical axes for "
            "each of its arrays",
            key="model.stream_of_other_tree",
        )
    return jax.tree.map(
        lambda names, x: _spec(names, x, rules), axes, stream, is_leaf=is_axes
    )


def _check_real(stream: Stream) -> None:
    for path, x in jax.tree.leaves_with_path(stream):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise InputError(
                f"the stream holds {x.dtype}{x.shape} at "
                f"{jax.tree_util.keystr(path) or 'its root'}, but what flows between "
                "blocks has gradients; read integers from scope.batch",
                key="model.integer_stream",
            )


def _default(x: Any, rules: Rules) -> tuple[str | None, ...]:
    if len(x.shape) == 3 and "residual_seq" in rules.table:
        return RESIDUAL
    return ()


def _spec(names: tuple[str | None, ...], x: Any, rules: Rules) -> PartitionSpec:
    if not names:
        return PartitionSpec()
    return rules.spec(names, x.shape, mesh_shape=auto_mesh_shape(), path="stream")
