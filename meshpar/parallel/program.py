"""A model's loss, gradients and logits under a layout, per device.

One `jax.shard_map`, manual over the batch axes, so that what crosses them is written
here: parameters gathered and gradients reduce-scattered per block (`zero`), one
reduction of the rest per step (`data`). GSPMD partitions over the other mesh axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from meshpar.collectives import asked, follow
from meshpar.layout import BATCH_AXES, Layout
from meshpar.model import Batch, Model, Params, Scope
from meshpar.parallel.blocks import run_blocks
from meshpar.parallel.data import reduce_gradients
from meshpar.parallel.zero import (
    Stored,
    gather,
    is_stored,
    reduce_scatter,
    zero_from_all,
)
from meshpar.rules import Rules
from meshpar.sharding import model_specs

_BATCH = PartitionSpec(BATCH_AXES)
_REPLICATED = PartitionSpec()
_COMPUTE_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


@dataclass(frozen=True, kw_only=True)
class LocalProgram:
    """The functions of a model under a layout, to be called inside `jax.jit`.

    Args:
        model: The model.
        layout: Sizes, remat and precision.
        rules: Logical axis -> mesh axes.
        mesh: The mesh, set with `jax.set_mesh` around every call; an `AbstractMesh`
            where the devices are absent.
        platform: Kind of device: `cpu`, `gpu` or `tpu`.
    """

    model: Model
    layout: Layout
    rules: Rules
    mesh: Mesh | AbstractMesh
    platform: str

    def loss_and_gradients(
        self, params: Params, batch: Batch, step: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, jax.Array, Params]:
        """Mean loss, summed weights, and fp32 gradients laid out as the parameters."""

        def local(
            params: Params, batch: Batch, step: jax.Array, seed: jax.Array
        ) -> tuple[jax.Array, jax.Array, Params]:
            inputs = {"batch": batch, "key": dropout_key(seed, step)}
            weights, groups = self._gather_ends(params)

            def losses(weights: Params, groups: list[Params]) -> tuple:
                return self._losses(weights, groups, inputs)

            loss_sum, vjp, weight_sum = jax.vjp(losses, weights, groups, has_aux=True)
            loss_sum, weight_sum = self._sum_over_batch((loss_sum, weight_sum))
            share = _safe_inverse(weight_sum)
            gradients = self._reduce(*vjp(share))
            return loss_sum * share, weight_sum, gradients

        return self._on_shards(
            local,
            (self._manual_specs, _BATCH, _REPLICATED, _REPLICATED),
            (_REPLICATED, _REPLICATED, self._manual_specs),
        )(params, batch, step, seed)

    def loss_sums(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Summed loss and summed weights over the global batch, without dropout."""

        def local(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
            weights, groups = self._gather_ends(params)
            sums = self._losses(weights, groups, {"batch": batch})
            return self._sum_over_batch(sums)

        outputs = (_REPLICATED, _REPLICATED)
        return self._on_shards(local, (self._manual_specs, _BATCH), outputs)(
            params, batch
        )

    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """fp32 logits (batch, seq, vocab), without dropout."""

        def local(params: Params, batch: Batch) -> jax.Array:
            weights, groups = self._gather_ends(params)
            inputs = {"batch": batch}
            x = self._hidden(weights, groups, inputs)
            return self.model.logits(weights, x, self._scope(inputs))

        return self._on_shards(local, (self._manual_specs, _BATCH), _BATCH)(
            params, batch
        )

    def _gather_ends(self, params: Params) -> tuple[Params, list[Params]]:
        ends, groups = self.model.split(params)
        stored_ends = self.model.split(self._stored)[0]
        weights, gathered = gather(stored_ends, ends, in_order=self._in_order)
        return jax.tree.map(lambda weight: follow(weight, gathered), weights), groups

    def _reduce(self, end_gradients: Params, group_gradients: list[Params]) -> Params:
        stored_ends, stored_groups = self.model.split(self._stored)
        in_order, earlier = self._in_order, None
        if in_order:
            earlier = zero_from_all(stored_groups, group_gradients)
        end_gradients, earlier = reduce_scatter(
            stored_ends, end_gradients, earlier=earlier, in_order=in_order
        )
        return reduce_gradients(
            self._stored,
            self.model.join(end_gradients, group_gradients),
            self._batch_axes,
            earlier=earlier,
            in_order=in_order,
        )

    def _losses(
        self, weights: Params, groups: list[Params], inputs: dict[str, Any]
    ) -> tuple[jax.Array, jax.Array]:
        x = self._hidden(weights, groups, inputs)
        return self.model.head(weights, x, inputs["batch"], self._scope(inputs))

    def _hidden(
        self, weights: Params, groups: list[Params], inputs: dict[str, Any]
    ) -> jax.Array:
        x = self.model.embed(weights, inputs["batch"], self._scope(inputs))
        first_layer = 0
        stored_groups = self.model.split(self._stored)[1]
        for group, shards, stored in zip(
            self.model.groups, groups, stored_groups, strict=True
        ):
            x = run_blocks(
                group,
                shards,
                x,
                inputs,
                stored=jax.tree.map(Stored.without_layers, stored, is_leaf=is_stored),
                remat=self.layout.remat,
                make_scope=self._scope,
                layers=first_layer + jnp.arange(group.num_layers, dtype=jnp.int32),
                in_order=self._in_order,
            )
            first_layer += group.num_layers
        return x

    def _scope(self, inputs: dict[str, Any]) -> Scope:
        return Scope(
            rules=self.rules,
            batch=inputs["batch"],
            layer=inputs.get("layer", -1),
            dropout_key=inputs.get("key"),
            platform=self.platform,
        )

    def _sum_over_batch(self, values: Any) -> Any:
        if not self._batch_axes:
            return values
        with asked("loss_sum"):
            return lax.psum(values, self._batch_axes)

    def _on_shards(self, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(BATCH_AXES),
            check_vma=False,
        )

    @property
    def _in_order(self) -> bool:
        return self.platform == "cpu"

    @property
    def _batch_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in BATCH_AXES if self.mesh.shape[axis] > 1)

    @cached_property
    def _stored(self) -> Any:
        dtype = _COMPUTE_DTYPES[self.layout.precision]
        specs = model_specs(self.model, dict(self.mesh.shape), self.rules)
        return jax.tree.map(
            lambda spec: Stored(spec=spec, compute_dtype=dtype),
            specs,
            is_leaf=lambda node: isinstance(node, PartitionSpec),
        )

    @cached_property
    def _manual_specs(self) -> Any:
        return jax.tree.map(
            lambda stored: stored.manual_spec, self._stored, is_leaf=is_stored
        )


def dropout_key(seed: jax.Array, step: jax.Array) -> jax.Array:
    """The key that a step's dropout derives from."""
    # Folded once more than the keys of initial values, which start from the same seed.
    key = jax.random.fold_in(jax.random.key(seed), jnp.uint32(0xD0))
    return jax.random.fold_in(key, step)


def _safe_inverse(weight_sum: jax.Array) -> jax.Array:
    return jnp.where(weight_sum > 0, 1 / jnp.where(weight_sum > 0, weight_sum, 1), 0.0)
