"""One layer of a group of blocks: gathered, run, differentiated and scattered again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.collectives import Zero, follow, zero_on_parts
from meshpar.errors import InputError
from meshpar.model.contract import BlockGroup
from meshpar.model.scope import Scope
from meshpar.parallel.remat import names_in, rematerialised
from meshpar.parallel.residuals import Residuals, restore_vjp, vjp_without
from meshpar.parallel.zero import (
    gather,
    gradient_in_loop,
    in_loop,
    reduce_scatter,
    zero_from_all,
)

Inputs = dict[str, Any]
"""Arrays without gradient that scopes are made of."""

Sums = dict[str, jax.Array]
"""Name of each auxiliary loss -> its sum, fp32."""


class Block:
    """One layer, as the loops call it.

    Of a layer's P values that are split over `n` devices of the batch axes at work,
    each pass gathers the P (n-1)/n that a device lacks, in the compute dtype; nothing
    where they are whole or gathered before the loop. What GSPMD adds over its own mesh
    axes, such as `tensor`, stands in the model's functions (`parallel.tensor`).

    Args:
        group: The blocks.
        stored: Tree of `Stored` beside the parameters, of one layer.
        remat: What the backward recomputes (`Layout.remat`).
        make_scope: Inputs -> the scope that blocks see.
        spec: How `x` lies over automatic mesh axes.
        padded: Whether a negative layer is a place without a block.
        in_order: Whether collectives wait for one another (`meshpar.collectives`).
    """

    def __init__(
        self,
        group: BlockGroup,
        *,
        stored: Any,
        remat: str,
        make_scope: Callable[[Inputs], Scope],
        spec: PartitionSpec,
        padded: bool = False,
        in_order: bool = False,
    ) -> None:
        self._stored, self._padded, self._in_order = stored, padded, in_order
        self._spec = spec
        self._run, self.remat = group.run, remat
        self._apply = rematerialised(group.run, remat)
        self.auxiliary = dict(group.auxiliary)
        self._make_scope = make_scope

    def forward(
        self, shard: Any, x: jax.Array, layer: jax.Array, inputs: Inputs
    ) -> tuple[jax.Array, Sums]:
        """The layer's output, and its sum of each auxiliary loss, fp32 scalars.

        One all-gather over the batch axes for each parameter that is split there.

        Args:
            shard: One layer's parameters, this device's shards.
            x: (batch, seq, embed), this device's examples; the output is alike.
            layer: int32 scalar, below 0 for a place without a layer: `x` goes through.
            inputs: What the scope is made of.
        """
        weights, gathered = self._gather(shard, x)
        scope_inputs = {**inputs, "layer": layer}
        found = self._call(weights, follow(x, gathered), scope_inputs)
        return self._passed_on(found, x, layer)

    def forward_keeping(
        self, shard: Any, x: jax.Array, layer: jax.Array, inputs: Inputs
    ) -> tuple[tuple[jax.Array, Sums], Residuals]:
        """`forward`, and what `backward` needs: no parameter is among it.

        Communicates as `forward`.
        """
        weights, gathered = self._gather(shard, x)
        scope_inputs = {**inputs, "layer": layer}
        found, residuals = vjp_without(
            lambda weights, x: self._call(weights, x, scope_inputs),
            (weights, follow(x, gathered)),
            known=(weights, scope_inputs),
        )
        return self._passed_on(found, x, layer), residuals

    def backward(
        self,
        shard: Any,
        residuals: Residuals,
        dx: jax.Array,
        of_loss: jax.Array | float,
        layer: jax.Array,
        inputs: Inputs,
    ) -> tuple[Any, jax.Array]:
        """Gradients of one layer's parameters, and of its `x`.

        The all-gathers of `forward` again; then one reduce-scatter over the batch axes
        for each parameter whose gradient is split in the loop (`gradient_in_loop`): of
        its P values each device sends P (n-1)/n, in `Stored.sum_dtype`. Other
        gradients stay this device's own until the loop is done.

        Args:
            shard: As for `forward`.
            residuals: From `forward_keeping`.
            dx: Gradient of its output, (batch, seq, embed).
            of_loss: Gradient of the summed loss, auxiliary losses among it; a scalar.
            layer: As for `forward`.
            inputs: As for `forward`.

        Returns:
            Gradients shaped as one layer's parameters, split as they are added up; and
            that of `x`. Zeros and `dx` itself at a place without a layer.
        """
        weights, gathered = self._gather(shard, dx)
        scope_inputs = {**inputs, "layer": layer}
        vjp = restore_vjp(residuals, (weights, scope_inputs))
        of_sums = {
            name: jnp.float32(coefficient * of_loss)
            for name, coefficient in self.auxiliary.items()
        }
        gradients, dx = self._cut(vjp((follow(dx, gathered), of_sums)), dx, layer)
        earlier = zero_from_all(self._stored, gradients) if self._in_order else None
        gradients, scattered = reduce_scatter(
            self._stored,
            gradients,
            gradient_in_loop,
            earlier=earlier,
            in_order=self._in_order,
        )
        return gradients, follow(dx, scattered)

    def residual_names(
        self, shard: Any, x: jax.Array, layer: jax.Array, inputs: Inputs
    ) -> tuple[str, ...]:
        """The names that the block gives to residuals; nothing is run."""

        def run(shard: Any, x: jax.Array) -> tuple[jax.Array, Sums]:
            weights, _ = self._gather(shard, x)
            return self._run(weights, x, self._make_scope({**inputs, "layer": layer}))

        return names_in(run, shard, x)

    def after(self, x: jax.Array, earlier: jax.Array) -> jax.Array:
        """`x`, no sooner than `earlier`, shaped alike, where that order is needed."""
        return follow(x, zero_on_parts(earlier, self._spec)) if self._in_order else x

    def _gather(self, shard: Any, x: jax.Array) -> tuple[Any, Zero | None]:
        # XLA unrolls a loop over one layer: then nothing else keeps the gathers back.
        earlier = zero_on_parts(x, self._spec) if self._in_order else None
        return gather(
            self._stored, shard, in_loop, earlier=earlier, in_order=self._in_order
        )

    def _call(
        self, weights: Any, x: jax.Array, scope_inputs: Inputs
    ) -> tuple[jax.Array, Sums]:
        y, sums = self._apply(self._make_scope, weights, x, scope_inputs)
        if y.shape != x.shape or y.dtype != x.dtype:
            raise InputError(
                f"a block maps {x.dtype}{x.shape} to {y.dtype}{y.shape}; blocks must "
                "keep shape and dtype, so that they can follow one another"
            )
        return y, sums

    def _passed_on(
        self, found: tuple[jax.Array, Sums], x: jax.Array, layer: jax.Array
    ) -> tuple[jax.Array, Sums]:
        """A block's result, or its `x` where there is no block."""
        if not self._padded:
            return found
        # Outside what is differentiated: `jnp.where` masks a NaN forward, not its
        # gradient, and a block's gradient may be NaN where all its weights are 0.
        (y, sums), here = found, layer >= 0
        sums = jax.tree.map(lambda value: jnp.where(here, value, 0), sums)
        return jnp.where(here, y, x), sums

    def _cut(
        self, found: tuple[Any, jax.Array], dy: jax.Array, layer: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Gradients of weights and `x`; zeros and `dy` where there is no block."""
        if not self._padded:
            return found
        (gradients, dx), here = found, layer >= 0
        gradients = jax.tree.map(lambda value: jnp.where(here, value, 0), gradients)
        return gradients, jnp.where(here, dx, dy)
