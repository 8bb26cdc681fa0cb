"""A model on its mesh: specs of its arrays, and collectives of a step around blocks.

`Placement` is shared by the programs of a model; `Scopes` makes the scope that the
model's functions see on a device.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshpar.collectives import asked, sum_dtype
from meshpar.hardware.platforms import platform_named
from meshpar.layout import BATCH_AXES, MANUAL_AXES, TOKEN_AXES, Layout
from meshpar.layout.requirements import check_precision
from meshpar.machine.mesh import device_kinds
from meshpar.model.contract import Model
from meshpar.model.inputs import Batch
from meshpar.model.parameter import Params
from meshpar.model.scope import Scope
from meshpar.model.token_order import TokenOrder
from meshpar.parallel.blocks import ScopeArrays
from meshpar.parallel.grids.space import input_spec, space_degree, splits_tokens
from meshpar.parallel.parameter_specs import stored_parameters, whole_spec
from meshpar.parallel.reduction import host_groups, reduce_gradients, sum_by_host
from meshpar.parallel.sizes import pairs_ticks
from meshpar.parallel.tensor import shard_index
from meshpar.parallel.zero import (
    Stored,
    before_loop,
    gather,
    gradient_after_loop,
    gradient_in_loop,
    in_loop,
    manual_spec,
    reduce_in_loop,
    scatter_after_loop,
)
from meshpar.rules.rules import Rules
from meshpar.rules.sharding import path_name

BATCH = PartitionSpec(BATCH_AXES)
REPLICATED = PartitionSpec()
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
PARAM_DTYPES = {**DTYPES, "bf16_stochastic": jnp.bfloat16}
"""Dtype of stored parameters, by the layout's `param_dtype`."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A model on its mesh; methods that communicate are called inside `on_shards`.

    Args:
        model: The model.
        layout: Sizes, remat and precision.
        rules: Logical axis -> mesh axes.
        mesh: The mesh, set with `use_mesh` around every call; an `AbstractMesh` if the
            devices are absent.
        platform: Kind of device: `cpu`, `gpu` or `tpu`.
        gradient_dtype: Dtype in which gradients are added up over microbatches and
            devices.
        replica_axes: Mesh axes along which each device trains its own replica:
            nothing is summed over them (`meshpar.train.local_steps`).
        hosts: The host of each device of the mesh, row by row; None if unknown.
        sums_by_host: Whether gradients are summed inside hosts first
            (`reduction.sum_by_host`).
    """

    model: Model
    layout: Layout
    rules: Rules
    mesh: Mesh | AbstractMesh
    platform: str
    gradient_dtype: Any = jnp.float32
    replica_axes: tuple[str, ...] = ()
    hosts: tuple[int, ...] | None = None
    sums_by_host: bool = False

    def on_shards(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Map a function of this device's parts over the manual mesh axes."""
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.manual_axes),
            check_vma=False,
        )

    def on_state(self, local: Callable, out_specs: Any) -> Callable:
        """Map a function of parts of (params, model state, batch, step, seed)."""
        state_specs = self.manual_specs, self.manual_model_state_specs
        in_specs = (*state_specs, BATCH, REPLICATED, REPLICATED)
        return self.on_shards(local, in_specs, out_specs)

    def on_training_state(self, local: Callable) -> Callable:
        """Map a function as `on_state` that returns a loss and gradients.

        It returns loss, metrics, gradients, model state and inputs' gradients. With
        separate replicas all of these, and the parameters and the state that it takes,
        have a leading dim of replicas.
        """
        model_state = self.manual_model_state_specs
        out = REPLICATED, REPLICATED, self.manual_specs, model_state, BATCH
        if not self.replica_axes:
            return self.on_state(local, out)

        def on_replica(params: Params, state: Params, *others: Any) -> Any:
            own = jax.tree.map(lambda x: x[0], (params, state))
            return jax.tree.map(lambda x: x[None], local(*own, *others))

        params, state, *out_specs = map(
            self.replica_specs, (self.manual_specs, model_state, *out)
        )
        in_specs = params, state, BATCH, REPLICATED, REPLICATED
        return self.on_shards(on_replica, in_specs, tuple(out_specs))

    def replica_specs(self, specs: Any) -> Any:
        """Return specs of arrays with a leading dim of all separate replicas."""
        return jax.tree.map(lambda spec: PartitionSpec(self.replica_axes, *spec), specs)

    def scopes(self, *, training: bool, order: TokenOrder | None = None) -> Scopes:
        """Return the maker of scopes of a model's functions.

        Args:
            training: True in a training step.
            order: Order of tokens over devices; None if devices have whole sequences.
        """
        return Scopes(
            order=order,
            rules=self.rules,
            platform=self.platform,
            batch_axes=self.large(BATCH_AXES),
            replica_axes=self.replica_axes,
            expert_hosts=self.expert_hosts,
            experts_in_parts=not self.pairs_ticks,
            num_microbatches=self.layout.microbatches,
            ranks_diverge=self.layout.divergent or bool(self.layout.data_splits),
            training=training,
        )

    def gather_before_loop(self, params: Params) -> tuple[Params, list[Params]]:
        """Gather the ends' parameters, and the blocks' as the loop takes them.

        One all-gather over the batch axes for each split parameter of the ends, and for
        each stacked one if the step gathers once (`fsdp_gather=step`): a device
        receives the P (n-1)/n of its P values that it lacks, in the compute dtype.

        Args:
            params: This device's shards at rest.

        Returns:
            The ends' parameters, whole over the batch axes; the (layers, ...) of each
            group of blocks on this device's stages, split as `Stored.loop_spec` says.
        """
        ends, _ = self.model.split(params)
        stored, _ = self.model.split(self.stored)
        return gather(stored, ends, before_loop), self.blocks_before_loop(params)

    def blocks_before_loop(self, params: Params) -> list[Params]:
        """Gather the blocks' parameters as the loop takes them."""
        _, groups = self.model.split(params)
        if not any(map(before_loop, jax.tree.leaves(self.stored))):
            return groups
        return gather(self.model.split(self.stored)[1], groups, before_loop)

    def scatter_ends(self, gradients: Params) -> Params:
        """Reduce-scatter the ends' gradients before they are added up.

        One reduce-scatter over the batch axes for each gradient that is split while it
        is added up (`zero=2` and `3`): of P values each device sends P (n-1)/n, in
        `Stored.sum_dtype`. The others stay this device's own until `reduce`.

        Args:
            gradients: Shaped as the ends' parameters for use.
        """
        return reduce_in_loop(self.model.split(self.stored)[0], gradients)

    def gradient_shapes(
        self, weights: Params, groups: list[Params]
    ) -> tuple[Params, list[Params]]:
        """Return local shapes of gradients while a step adds them up.

        Args:
            weights: Gathered parameters of the ends.
            groups: Parameters of the blocks, as the loop takes them.
        """

        def degree(mesh_axes: tuple[str, ...]) -> int:
            return math.prod(self.mesh.shape[axis] for axis in mesh_axes)

        def shape(stored: Stored, shard: jax.Array) -> jax.ShapeDtypeStruct:
            dims = list(shard.shape)
            for dim, axes in in_loop(stored):
                dims[dim] *= degree(axes)
            for dim, axes in gradient_in_loop(stored):
                dims[dim] //= degree(axes)
            return jax.ShapeDtypeStruct(tuple(dims), stored.gradient_dtype)

        tree = self.model.join(weights, groups)
        shapes = jax.tree.map(shape, self.stored, tree)
        return self.model.split(shapes)

    def reduce(
        self,
        end_gradients: Params,
        group_gradients: list[Params],
    ) -> Params:
        """Sum gradients over the batch axes and `stage`, laid out as states.

        Each gradient crosses each mesh axis once; what the loop has summed does not
        again. Over the batch axes that split its state and not yet the gradient: one
        reduce-scatter for each gradient; of P values a device sends P (n-1)/n. Over the
        other batch axes, and `stage` for the ends: one all-reduce of all such
        gradients, 2 P (n-1)/n.

        Args:
            end_gradients: Gradients of the ends, from `scatter_ends`.
            group_gradients: Gradients of each group of blocks, as the loop sums them.
        """
        gradients = self.model.join(end_gradients, group_gradients)
        scattered = scatter_after_loop(self.stored, gradients)
        axes = self.large(self.manual_axes)
        summed = reduce_gradients(self.stored, scattered, axes, **self.sum_options)
        return jax.tree.map(
            lambda stored, x: x.astype(stored.gradient_dtype), self.stored, summed
        )

    @property
    def sum_options(self) -> dict[str, Any]:
        """Return keyword arguments of `reduce_gradients`."""
        if not self.sums_by_host:
            return {}
        return {"sum_over": functools.partial(sum_by_host, self._mesh_hosts)}

    @property
    def expert_hosts(self) -> int:
        """Return the hosts of the devices that share experts, as for `Scope`."""
        axes = Scope(rules=self.rules, batch_axes=self.large(BATCH_AXES)).expert_axes
        if self.hosts is None or not axes:
            return 1
        groups = host_groups(self._mesh_hosts, axes)
        if groups is None:
            return 1
        devices = list(itertools.chain(*groups.inside))
        return len(groups.inside) if devices == sorted(devices) else 1

    @property
    def pairs_ticks(self) -> bool:
        """True if a tick's forward and backward of experts run side by side."""
        if device_kinds(self.mesh) > 1:
            return False
        platform = platform_named(self.platform)
        return pairs_ticks(self.layout, platform, self.expert_hosts)

    @property
    def _mesh_hosts(self) -> np.ndarray:
        return np.array(self.hosts).reshape(list(self.mesh.shape.values()))

    def sum_losses(self, values: Any, mesh_axes: tuple[str, ...] = TOKEN_AXES) -> Any:
        """Sum loss and weights over the mesh axes that split tokens, or over others."""
        axes = self.large(mesh_axes)
        if axes:
            with asked("loss_sum"):
                values = lax.psum(values, axes)
        return jax.tree.map(jnp.asarray, values)  # A weight can be a constant.

    def large(self, mesh_axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the mesh axes of size above 1 to sum over, without `replica_axes`.

        If `context` splits space it is left out too: GSPMD sums over it.
        """
        absent = (
            self.replica_axes if self.splits_tokens else (*self.replica_axes, "context")
        )
        return tuple(
            axis
            for axis in mesh_axes
            if self.mesh.shape[axis] > 1 and axis not in absent
        )

    def batch_sharding(self, name: str, array: Any) -> NamedSharding:
        """Return the sharding of an array of a batch: examples and space are split.

        Raises:
            RuleError: A dim of space does not divide.
        """
        declared = (self.model.inputs or {}).get(name)
        sizes = self.layout.mesh_shape
        spec = input_spec(name, declared, array, self.rules, sizes)
        return NamedSharding(self.mesh, spec)

    @property
    def splits_space(self) -> bool:
        """True if several devices share the space of an example."""
        return space_degree(self.model, self.layout, self.rules) > 1

    @property
    def splits_tokens(self) -> bool:
        """True if `context` splits sequences, each device with its own tokens."""
        return splits_tokens(self.model, self.layout, self.rules)

    @cached_property
    def communicates_in_loop(self) -> bool:
        """True if a block's parameters or gradients cross batch axes in the loop."""
        blocks = jax.tree.leaves(self.model.split(self.stored)[1])
        return any(in_loop(stored) or stored.reduces_in_loop for stored in blocks)

    @property
    def prefetches(self) -> bool:
        """True if the blocks prefetch (`parallel.prefetch`), as they communicate."""
        return bool(self.loop_axes) and self.communicates_in_loop

    @property
    def loop_axes(self) -> tuple[str, ...]:
        """Return the batch axes that one block's parameters cross beside another."""
        return () if self.layout.runs_in_ticks else self._overlapped_axes

    @property
    def reduces_in_last_tick(self) -> bool:
        """True if sums of gradients are reduced beside the last backward of ticks.

        Pipelines and TPUs do only if they are asked to: most of a rank's gradients
        took longer than one microbatch's backward, and hid little, and XLA:TPU hid
        nothing (`docs/guides/audit.md`).
        """
        layout = self.layout
        if layout.execution == "divergent" or layout.data_splits:
            return False
        by_default = platform_named(self.platform).overlaps_last_microbatch
        wanted = (by_default and layout.stage == 1) or layout.fsdp_prefetch == "on"
        return layout.runs_in_ticks and wanted and bool(self._overlapped_axes)

    @property
    def _overlapped_axes(self) -> tuple[str, ...]:
        """Return the batch axes that are crossed beside blocks, if any are."""
        choice = self.layout.fsdp_prefetch
        overlaps = platform_named(self.platform).overlaps_collectives
        if choice == "off" or not (choice == "on" or overlaps):
            return ()
        return tuple(axis for axis in self.large(self.manual_axes) if axis != "stage")

    @property
    def manual_axes(self) -> tuple[str, ...]:
        """Return the mesh axes that `on_shards` makes manual."""
        stage, context = self.layout.runs_in_ticks, self.splits_tokens
        absent = {"stage": not stage, "context": not context}
        return tuple(axis for axis in MANUAL_AXES if not absent.get(axis, False))

    @property
    def compute_dtype(self) -> Any:
        """Return the dtype that blocks compute in."""
        check_precision(self.layout)
        return DTYPES[self.layout.precision]

    @cached_property
    def stored(self) -> Any:
        """Return the tree of `Stored` of the parameters."""
        return stored_parameters(
            self.model,
            self.layout,
            self.rules,
            compute_dtype=self.compute_dtype,
            gradient_dtype=self.gradient_dtype,
            sum_dtype=sum_dtype(self.gradient_dtype, self.platform),
            scatter_columns=platform_named(self.platform).scatter_columns,
            loop_axes=self.loop_axes,
        )

    @cached_property
    def last_reductions(self) -> list[Any]:
        """Return for each group how a layer's sum is reduced, stacked (`Stored`)."""
        axes = self.large(self.manual_axes)
        _, groups = self.model.split(self.stored)

        def reduced(stored: Stored) -> Stored:
            # One that is split along the layers is scattered with all of them.
            along = any(dim == 0 for dim, _ in gradient_after_loop(stored))
            return stored if along else stored.reduced_from_sum(axes)

        return jax.tree.map(reduced, groups)

    @cached_property
    def manual_specs(self) -> Any:
        """Return specs of parameters, gradients and states over the manual axes."""
        return self.specs(lambda stored: manual_spec(stored.spec))

    @cached_property
    def model_state_specs(self) -> Any:
        """Return specs of the model's own state: whole over the batch axes."""
        return jax.tree.map_with_path(
            lambda path, array: whole_spec(
                path_name(path), array, self.layout, self.rules
            ),
            self.model.state,
        )

    @cached_property
    def manual_model_state_specs(self) -> Any:
        """Return the part of `model_state_specs` over the manual mesh axes."""
        return jax.tree.map(manual_spec, self.model_state_specs)

    def specs(self, choose: Callable[[Stored], PartitionSpec]) -> Any:
        """Choose a spec for every parameter."""
        return jax.tree.map(choose, self.stored)


@dataclass(frozen=True, kw_only=True)
class Scopes:
    """Maker of scopes, inside `jax.shard_map` over the manual mesh axes.

    Args:
        rules: Logical axis -> mesh axes.
        platform: Kind of device.
        batch_axes: Mesh axes of size above 1 that split the batch.
        replica_axes: Other mesh axes that split the batch, with one replica each.
        expert_hosts: As for `Scope`.
        experts_in_parts: As for `Scope`.
        num_microbatches: Number of parts in which a device runs its examples.
        ranks_diverge: As for `Scope`.
        training: True in a training step.
        order: Order of tokens over devices; None if devices have whole sequences.
    """

    rules: Rules
    platform: str
    batch_axes: tuple[str, ...]
    expert_hosts: int = 1
    experts_in_parts: bool = True
    num_microbatches: int = 1
    ranks_diverge: bool = False
    training: bool = True
    order: TokenOrder | None = None
    replica_axes: tuple[str, ...] = ()

    def __call__(self, arrays: ScopeArrays, **shared: Any) -> Scope:
        """Return the scope of these arrays; `shared` has fields that ranks share."""
        return Scope(
            rules=self.rules,
            batch=Batch(arrays.batch),
            layer=-1 if arrays.layer is None else arrays.layer,
            state={} if arrays.state is None else arrays.state,
            examples=arrays.examples,
            random=arrays.random,
            training=self.training,
            batch_axes=shared.pop("batch_axes", self.batch_axes),
            expert_hosts=self.expert_hosts,
            experts_in_parts=self.experts_in_parts,
            num_microbatches=self.num_microbatches,
            ranks_diverge=self.ranks_diverge,
            platform=self.platform,
            order=self.order,
            cache=arrays.cache,
            **shared,
        )

    def examples(self, batch: Any) -> jax.Array:
        """Return the global index of each example of this device, uint32."""
        rows = jax.tree.leaves(batch)[0].shape[0]
        first = shard_index((*self.replica_axes, *self.batch_axes)) * rows
        return (first + jnp.arange(rows)).astype(jnp.uint32)
