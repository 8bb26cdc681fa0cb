"""A model's loss, gradients and logits under a layout without stages, per device.

One `jax.shard_map`, manual over the batch axes, so that what crosses them is written
here: parameters gathered and gradients reduce-scattered per block (`zero`), one
reduction of the rest per step (`data`). GSPMD partitions over the other mesh axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.model import Batch, Params
from meshpar.parallel.blocks import Block, run_blocks
from meshpar.parallel.placement import (
    BATCH,
    REPLICATED,
    Placement,
    dropout_key,
    safe_inverse,
)
from meshpar.parallel.zero import Stored, is_stored


@dataclass(frozen=True, kw_only=True)
class LocalProgram:
    """The functions of a model under a layout, to be called inside `jax.jit`."""

    placement: Placement

    def loss_and_gradients(
        self, params: Params, batch: Batch, step: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, jax.Array, Params]:
        """Mean loss, summed weights, and fp32 gradients laid out as the parameters."""
        placement = self.placement

        def local(
            params: Params, batch: Batch, step: jax.Array, seed: jax.Array
        ) -> tuple[jax.Array, jax.Array, Params]:
            inputs = {"batch": batch, "key": dropout_key(seed, step)}
            weights, groups = placement.gather_ends(params)

            def losses(weights: Params, groups: list[Params]) -> tuple:
                return self._losses(weights, groups, inputs)

            loss_sum, vjp, weight_sum = jax.vjp(losses, weights, groups, has_aux=True)
            loss_sum, weight_sum = placement.sum_losses((loss_sum, weight_sum))
            share = safe_inverse(weight_sum)
            gradients = placement.reduce(*vjp(share))
            return loss_sum * share, weight_sum, gradients

        specs = placement.manual_specs
        return placement.on_shards(
            local,
            (specs, BATCH, REPLICATED, REPLICATED),
            (REPLICATED, REPLICATED, specs),
        )(params, batch, step, seed)

    def loss_sums(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Summed loss and summed weights over the global batch, without dropout."""
        placement = self.placement

        def local(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
            weights, groups = placement.gather_ends(params)
            return placement.sum_losses(self._losses(weights, groups, {"batch": batch}))

        return placement.on_shards(
            local, (placement.manual_specs, BATCH), (REPLICATED, REPLICATED)
        )(params, batch)

    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """fp32 logits (batch, seq, vocab), without dropout."""
        placement = self.placement

        def local(params: Params, batch: Batch) -> jax.Array:
            weights, groups = placement.gather_ends(params)
            inputs = {"batch": batch}
            x = self._hidden(weights, groups, inputs)
            return placement.model.logits(weights, x, placement.scope(inputs))

        return placement.on_shards(local, (placement.manual_specs, BATCH), BATCH)(
            params, batch
        )

    def _losses(
        self, weights: Params, groups: list[Params], inputs: dict[str, Any]
    ) -> tuple[jax.Array, jax.Array]:
        placement = self.placement
        x = self._hidden(weights, groups, inputs)
        scope = placement.scope(inputs)
        return placement.model.head(weights, x, inputs["batch"], scope)

    def _hidden(
        self, weights: Params, groups: list[Params], inputs: dict[str, Any]
    ) -> jax.Array:
        placement = self.placement
        model = placement.model
        x = model.embed(weights, inputs["batch"], placement.scope(inputs))
        first_layer = 0
        stored_groups = model.split(placement.stored)[1]
        for group, shards, stored in zip(
            model.groups, groups, stored_groups, strict=True
        ):
            block = Block(
                group,
                stored=jax.tree.map(Stored.without_layers, stored, is_leaf=is_stored),
                remat=placement.layout.remat,
                make_scope=placement.scope,
                spec=placement.residual_spec(x.shape),
                in_order=placement.in_order,
            )
            layers = first_layer + jnp.arange(group.num_layers, dtype=jnp.int32)
            x = run_blocks(block, shards, x, layers, inputs)
            first_layer += group.num_layers
        return x
