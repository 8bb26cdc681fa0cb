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

from meshpar.collectives import zero_on_parts
from meshpar.model.contract import Params
from meshpar.model.scope import Batch
from meshpar.parallel.block import Block, Sums
from meshpar.parallel.blocks import (
    check_names,
    run_backward,
    run_blocks,
    run_keeping,
)
from meshpar.parallel.placement import (
    BATCH,
    REPLICATED,
    Placement,
    dropout_key,
    metrics_of,
    safe_inverse,
)
from meshpar.parallel.residuals import Residuals
from meshpar.parallel.zero import Stored, is_stored

_Inputs = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LocalProgram:
    """The functions of a model under a layout, to be called inside `jax.jit`.

    Over the batch axes move: parameters to where they are used
    (`Placement.gather_before_loop`, `Block`), gradients (`Block.backward`,
    `Placement.reduce`), and one all-reduce of two fp32 scalars and a few of auxiliary
    losses.

    Args:
        placement: The model on its mesh.
    """

    placement: Placement

    def loss_and_gradients(
        self, params: Params, batch: Batch, step: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array], Params]:
        """Mean loss, more metrics, and gradients laid out as the states.

        Args:
            params: At rest, global.
            batch: Arrays (global batch, ...), split over the batch axes.
            step: uint32 or int32 scalar; dropout derives from it and `seed`.
            seed: uint32 scalar.

        Returns:
            fp32 scalar; dict of fp32 scalars; a tree as `params`.
        """
        placement = self.placement

        def local(
            params: Params, batch: Batch, step: jax.Array, seed: jax.Array
        ) -> tuple[jax.Array, dict[str, jax.Array], Params]:
            return self._of_shards(
                params, {"batch": batch, "key": dropout_key(seed, step)}
            )

        specs = placement.manual_specs
        return placement.on_shards(
            local,
            (specs, BATCH, REPLICATED, REPLICATED),
            (REPLICATED, REPLICATED, placement.manual_state_specs),
        )(params, batch, step, seed)

    def _of_shards(
        self, params: Params, inputs: _Inputs
    ) -> tuple[jax.Array, dict[str, jax.Array], Params]:
        """`loss_and_gradients` of this device's shards and examples."""
        placement = self.placement
        weights, groups = placement.gather_before_loop(params)
        x, embed_vjp = jax.vjp(lambda weights: self._embed(weights, inputs), weights)
        blocks = self._blocks(x)
        x, sums, kept = self._forward(blocks, groups, x, inputs)
        loss_sum, head_vjp, weight_sum = jax.vjp(
            lambda weights, x: self._head(weights, x, inputs), weights, x, has_aux=True
        )
        loss_sum, weight_sum, sums = placement.sum_losses((loss_sum, weight_sum, sums))
        share = safe_inverse(weight_sum)
        ends, dx = head_vjp(share)
        shapes = placement.gradient_shapes(weights, groups)[1]
        totals = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        dx, block_gradients = self._backward(
            blocks, groups, kept, dx, share, inputs, totals
        )
        (more,) = embed_vjp(dx)
        ends = jax.tree.map(jnp.add, ends, more)
        gradients = self._reduced(ends, block_gradients, dx)
        loss_sum += sum(
            group.weighted(of_group)
            for group, of_group in zip(placement.model.groups, sums, strict=True)
        )
        return loss_sum * share, metrics_of(weight_sum, _by_name(sums)), gradients

    def loss_sums(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Summed loss and summed weights over the global batch, without dropout."""
        placement = self.placement

        def local(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
            weights, groups = placement.gather_before_loop(params)
            return placement.sum_losses(self._losses(weights, groups, {"batch": batch}))

        return placement.on_shards(
            local, (placement.manual_specs, BATCH), (REPLICATED, REPLICATED)
        )(params, batch)

    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """fp32 logits (batch, seq, vocab), without dropout."""
        placement = self.placement

        def local(params: Params, batch: Batch) -> jax.Array:
            weights, groups = placement.gather_before_loop(params)
            inputs = {"batch": batch}
            x = self._hidden(weights, groups, inputs)
            return placement.model.logits(weights, x, placement.scope(inputs))

        return placement.on_shards(local, (placement.manual_specs, BATCH), BATCH)(
            params, batch
        )

    def _losses(
        self, weights: Params, groups: list[Params], inputs: _Inputs
    ) -> tuple[jax.Array, jax.Array]:
        return self._head(weights, self._hidden(weights, groups, inputs), inputs)

    def _hidden(
        self, weights: Params, groups: list[Params], inputs: _Inputs
    ) -> jax.Array:
        x = self._embed(weights, inputs)
        for (block, layers), shards in zip(self._blocks(x), groups, strict=True):
            x, _ = run_blocks(block, shards, x, layers, inputs)
        return x

    def _embed(self, weights: Params, inputs: _Inputs) -> jax.Array:
        placement = self.placement
        return placement.model.embed(weights, inputs["batch"], placement.scope(inputs))

    def _head(
        self, weights: Params, x: jax.Array, inputs: _Inputs
    ) -> tuple[jax.Array, jax.Array]:
        scope = self.placement.scope(inputs)
        return self.placement.model.head(weights, x, inputs["batch"], scope)

    def _forward(
        self,
        blocks: list[tuple[Block, jax.Array]],
        groups: list[Params],
        x: jax.Array,
        inputs: _Inputs,
    ) -> tuple[jax.Array, list[Sums], list[Residuals]]:
        named = zip(blocks, groups, strict=True)
        check_names([(*block, shards) for block, shards in named], x, inputs)
        sums, kept = [], []
        for (block, layers), shards in zip(blocks, groups, strict=True):
            x, of_group, residuals = run_keeping(block, shards, x, layers, inputs)
            sums.append(of_group)
            kept.append(residuals)
        return x, sums, kept

    def _backward(
        self,
        blocks: list[tuple[Block, jax.Array]],
        groups: list[Params],
        kept: list[Residuals],
        dx: jax.Array,
        of_loss: jax.Array,
        inputs: _Inputs,
        totals: list[Params],
    ) -> tuple[jax.Array, list[Params]]:
        gradients = []
        for (block, layers), shards, residuals, total in reversed(
            list(zip(blocks, groups, kept, totals, strict=True))
        ):
            dx, total = run_backward(
                block,
                shards,
                residuals,
                dx,
                layers,
                inputs,
                total,
                _put,
                of_loss=of_loss,
            )
            gradients.append(total)
        return dx, gradients[::-1]

    def _reduced(self, ends: Params, groups: list[Params], last: jax.Array) -> Params:
        placement = self.placement
        earlier = None
        if placement.in_order:  # after the last layer's reduce-scatter
            earlier = zero_on_parts(last, placement.residual_spec(last.shape))
        ends, _ = placement.scatter_ends(ends, earlier)
        return placement.reduce(ends, groups)

    def _blocks(self, x: jax.Array) -> list[tuple[Block, jax.Array]]:
        """Each group's block, and the indices of its layers."""
        placement = self.placement
        model = placement.model
        blocks, first_layer = [], 0
        for group, stored in zip(
            model.groups, model.split(placement.stored)[1], strict=True
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
            blocks.append((block, layers))
            first_layer += group.num_layers
        return blocks


def _by_name(sums: list[Sums]) -> Sums:
    """The auxiliary losses of all groups, those of one name together."""
    total: Sums = {}
    for of_group in sums:
        for name, value in of_group.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _put(totals: Params, gradients: Params, place: jax.Array) -> Params:
    return jax.tree.map(
        lambda total, gradient: total.at[place].set(gradient.astype(total.dtype)),
        totals,
        gradients,
    )
