"""A model on a mesh: its parameters stored, gathered and reduced, per device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshpar.collectives import asked, follow, zero_from
from meshpar.layout import BATCH_AXES, MANUAL_AXES, Layout
from meshpar.model import Model, Params, Scope, spec_axes
from meshpar.parallel.data import reduce_gradients
from meshpar.parallel.zero import (
    Stored,
    gather,
    is_stored,
    reduce_scatter,
    zero_from_all,
)
from meshpar.rules import Rules, auto_mesh_shape
from meshpar.sharding import model_specs

BATCH = PartitionSpec(BATCH_AXES)
REPLICATED = PartitionSpec()
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
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

    def gather_ends(self, params: Params) -> tuple[Params, list[Params]]:
        """The ends' parameters for use, and the blocks' as they are stored."""
        ends, groups = self.model.split(params)
        stored_ends = self.model.split(self.stored)[0]
        weights, gathered = gather(stored_ends, ends, in_order=self.in_order)
        return jax.tree.map(lambda weight: follow(weight, gathered), weights), groups

    def reduce(
        self,
        end_gradients: Params,
        group_gradients: list[Params],
        *,
        after: jax.Array | None = None,
    ) -> Params:
        """Gradients reduced over the mesh axes that they have not been reduced over.

        Args:
            end_gradients: Of the ends.
            group_gradients: Of each group of blocks.
            after: A number that must be known first, where collectives are in order.
        """
        stored_ends, stored_groups = self.model.split(self.stored)
        in_order, earlier = self.in_order, None
        if in_order:
            earlier = zero_from_all(stored_groups, group_gradients)
        if in_order and after is not None:
            earlier += zero_from(after)
        end_gradients, earlier = reduce_scatter(
            stored_ends, end_gradients, earlier=earlier, in_order=in_order
        )
        return reduce_gradients(
            self.stored,
            self.model.join(end_gradients, group_gradients),
            self._large(self.manual_axes),
            earlier=earlier,
            in_order=in_order,
        )

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
        return MANUAL_AXES if is_pipelined(self.layout) else BATCH_AXES

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
        specs = model_specs(self.model, dict(self.mesh.shape), self.rules)
        return jax.tree.map(
            lambda spec: Stored(
                spec=spec,
                compute_dtype=self.compute_dtype,
                # XLA:CPU aborts on a reduction in bf16 beside automatic mesh axes.
                gradient_dtype=jnp.float32 if self.in_order else self.gradient_dtype,
            ),
            specs,
            is_leaf=lambda node: isinstance(node, PartitionSpec),
        )

    @cached_property
    def manual_specs(self) -> Any:
        """The parameters' specs over the manual mesh axes."""
        return jax.tree.map(
            lambda stored: stored.manual_spec, self.stored, is_leaf=is_stored
        )

    def _large(self, mesh_axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in mesh_axes if self.mesh.shape[axis] > 1)


def is_pipelined(layout: Layout) -> bool:
    """Whether a step runs in ticks: it has stages, or microbatches to accumulate."""
    return layout.stage > 1 or layout.microbatches > 1


def dropout_key(seed: jax.Array, step: jax.Array) -> jax.Array:
    """The key that a step's dropout derives from."""
    # Folded once more than the keys of initial values, which start from the same seed.
    key = jax.random.fold_in(jax.random.key(seed), jnp.uint32(0xD0))
    return jax.random.fold_in(key, step)


def safe_inverse(weight_sum: jax.Array) -> jax.Array:
    """1 / `weight_sum`, or 0 where no token counts."""
    return jnp.where(weight_sum > 0, 1 / jnp.where(weight_sum > 0, weight_sum, 1), 0.0)
