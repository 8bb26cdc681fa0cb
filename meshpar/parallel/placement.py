"""A model on a mesh: its parameters stored, gathered and reduced, per device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshpar.collectives import Zero, asked, follow, zero_from
from meshpar.layout import BATCH_AXES, MANUAL_AXES, Layout
from meshpar.model.contract import Model, Params
from meshpar.model.scope import Scope
from meshpar.parallel.data import reduce_gradients
from meshpar.parallel.storage import stored_parameters
from meshpar.parallel.zero import (
    Stored,
    after_update,
    before_loop,
    gather,
    gather_shards,
    gradient_after_loop,
    gradient_in_loop,
    in_loop,
    is_stored,
    manual_spec,
    reduce_scatter,
    zero_from_all,
)
from meshpar.rules.rules import Rules, auto_mesh_shape, spec_axes

BATCH = PartitionSpec(BATCH_AXES)
REPLICATED = PartitionSpec()
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
PARAM_DTYPES = {**DTYPES, "bf16_stochastic": jnp.bfloat16}
"""What parameters are stored in, by the layout's `param_dtype`."""

_RESIDUAL = ("batch", "residual_seq", "embed")


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
    """

    model: Model
    layout: Layout
    rules: Rules
    mesh: Mesh | AbstractMesh
    platform: str
    gradient_dtype: Any = jnp.float32

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

    def scope(self, inputs: dict[str, Any]) -> Scope:
        """What a model's function sees; `inputs` has the batch and more."""
        return Scope(
            rules=self.rules,
            batch=inputs["batch"],
            layer=inputs.get("layer", -1),
            dropout_key=inputs.get("key"),
            token_positions=inputs.get("positions"),
            full_seq=inputs.get("full_seq"),
            platform=self.platform,
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
        ends, groups = self.model.split(params)
        stored_ends, stored_groups = self.model.split(self.stored)
        weights, done = gather(stored_ends, ends, before_loop, in_order=self.in_order)
        gathered = []
        for stored, group in zip(stored_groups, groups, strict=True):
            if self._gathers_once:
                group, done = gather(
                    stored, group, before_loop, earlier=done, in_order=self.in_order
                )
            gathered.append(group)
        return jax.tree.map(lambda weight: follow(weight, done), weights), gathered

    def at_rest(self, values: Params, earlier: jax.Array | None = None) -> Params:
        """Parameters as they lie between steps, from shards laid out as states.

        Args:
            values: Global arrays in their dtype at rest.
            earlier: What the first gather waits for, where collectives are in order.
        """
        if not any(after_update(stored) for stored in self._all_stored):
            return values

        def local(values: Params, earlier: jax.Array) -> Params:
            return gather_shards(
                self.stored,
                values,
                after_update,
                earlier=zero_from(earlier) if self.in_order else None,
                in_order=self.in_order,
            )[0]

        earlier = jnp.zeros(()) if earlier is None else earlier
        return self.on_shards(
            local, (self.manual_state_specs, REPLICATED), self.manual_specs
        )(values, earlier)

    def scatter_ends(
        self, gradients: Params, earlier: Zero | None = None
    ) -> tuple[Params, Zero | None]:
        """The ends' gradients as they are added up, and what is to wait for that.

        One reduce-scatter over the batch axes for each that is split while it is added
        up (`zero=2` and `3`): of P values each device sends P (n-1)/n, in
        `Stored.sum_dtype`. The others stay this device's own, until `reduce`.

        Args:
            gradients: Shaped as the ends' parameters for use.
            earlier: What the first must wait for, where collectives are in order.
        """
        return reduce_scatter(
            self.model.split(self.stored)[0],
            gradients,
            gradient_in_loop,
            earlier=earlier,
            in_order=self.in_order,
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
        shapes = jax.tree.map(shape, self.stored, tree, is_leaf=is_stored)
        return self.model.split(shapes)

    def reduce(
        self,
        end_gradients: Params,
        group_gradients: list[Params],
        *,
        after: jax.Array | None = None,
        scale: jax.Array | None = None,
    ) -> Params:
        """Gradients summed over the batch axes and `stage`, laid out as states.

        Each gradient crosses each mesh axis once, after the loop. Over the batch axes
        that its state is split over, and it itself was not yet: one reduce-scatter for
        each gradient, of P values a device sends P (n-1)/n. Over the other batch axes,
        and `stage` for the ends: one all-reduce of all such gradients, 2 P (n-1)/n.

        Args:
            end_gradients: Of the ends, from `scatter_ends`.
            group_gradients: Of each group of blocks, as the loop adds them up.
            after: A number that must be known first, where collectives are in order.
            scale: What the sums are multiplied by.
        """
        stored_ends, stored_groups = self.model.split(self.stored)
        in_order, earlier = self.in_order, None
        if in_order:
            earlier = zero_from_all(
                self.stored, self.model.join(end_gradients, group_gradients)
            )
        if in_order and after is not None:
            earlier += zero_from(after)
        end_gradients, earlier = reduce_scatter(
            stored_ends,
            end_gradients,
            gradient_after_loop,
            earlier=earlier,
            in_order=in_order,
        )
        group_gradients, earlier = reduce_scatter(
            stored_groups,
            group_gradients,
            gradient_after_loop,
            earlier=earlier,
            in_order=in_order,
        )
        summed = reduce_gradients(
            self.stored,
            self.model.join(end_gradients, group_gradients),
            self._large(self.manual_axes),
            earlier=earlier,
            in_order=in_order,
        )
        if scale is not None:
            return scaled(summed, scale, self.gradient_dtype)
        return jax.tree.map(lambda x: x.astype(self.gradient_dtype), summed)

    def sum_losses(self, values: Any, mesh_axes: tuple[str, ...] = BATCH_AXES) -> Any:
        """Loss and weights summed over the batch axes, or over more."""
        axes = self._large(mesh_axes)
        if not axes:
            return values
        with asked("loss_sum"):
            return lax.psum(values, axes)

    def residual_spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """How the residual stream (batch, seq, embed) lies over automatic mesh axes."""
        if "residual_seq" not in self.rules.table:
            return PartitionSpec()
        spec = self.rules.spec(_RESIDUAL, shape, mesh_shape=auto_mesh_shape())
        return spec if spec_axes(spec) else PartitionSpec()

    @property
    def manual_axes(self) -> tuple[str, ...]:
        """The mesh axes that `on_shards` makes manual."""
        return MANUAL_AXES if self.layout.runs_in_ticks else BATCH_AXES

    @property
    def in_order(self) -> bool:
        """Whether collectives wait for one another (`meshpar.collectives`)."""
        return self.platform == "cpu"

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
            # XLA:CPU aborts on a reduction in bf16 beside automatic mesh axes.
            sum_dtype=jnp.float32 if self.in_order else self.gradient_dtype,
        )

    @cached_property
    def manual_specs(self) -> Any:
        """Specs of the parameters at rest over the manual mesh axes."""
        return self.specs(lambda stored: manual_spec(stored.spec))

    @cached_property
    def manual_state_specs(self) -> Any:
        """Specs of gradients and states over the manual mesh axes."""
        return self.specs(lambda stored: manual_spec(stored.state_spec))

    def specs(self, of: Callable[[Stored], PartitionSpec]) -> Any:
        """A spec for every parameter."""
        return jax.tree.map(of, self.stored, is_leaf=is_stored)

    @property
    def _all_stored(self) -> list[Stored]:
        return jax.tree.leaves(self.stored, is_leaf=is_stored)

    @property
    def _gathers_once(self) -> bool:
        return any(before_loop(stored) for stored in self._all_stored)

    def _degree(self, mesh_axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in mesh_axes)

    def _large(self, mesh_axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in mesh_axes if self.mesh.shape[axis] > 1)


def metrics_of(
    weight_sum: jax.Array, auxiliary: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """What a step reports beside the loss: weights, and each auxiliary loss's mean."""
    share = safe_inverse(weight_sum)
    means = {f"auxiliary.{name}": value * share for name, value in auxiliary.items()}
    return {"weight_sum": weight_sum, **means}


def dropout_key(seed: jax.Array, step: jax.Array) -> jax.Array:
    """The key that a step's dropout derives from."""
    # Folded once more than the keys of initial values, which start from the same seed.
    key = jax.random.fold_in(jax.random.key(seed), jnp.uint32(0xD0))
    return jax.random.fold_in(key, step)


def safe_inverse(weight_sum: jax.Array) -> jax.Array:
    """1 / `weight_sum`, or 0 where no token counts."""
    some = weight_sum != 0
    return jnp.where(some, 1 / jnp.where(some, weight_sum, 1), 0.0)


def scaled(tree: Any, scale: jax.Array, dtype: Any = None) -> Any:
    """Every array times an fp32 `scale`, rounded once.

    A scale rounded to an array's own few bits would move all its values one way.

    Args:
        tree: Arrays.
        scale: A scalar.
        dtype: Of the result; each array's own when absent.
    """
    wide = scale.astype(jnp.float32)
    return jax.tree.map(lambda x: (x * wide).astype(dtype or x.dtype), tree)
