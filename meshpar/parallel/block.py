"""One layer of a group of blocks: gathered, run, differentiated and scattered again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.model.contract import BlockGroup, Stream
from meshpar.model.sums import Sums
from meshpar.parallel.remat import names_in, rematerialised
from meshpar.parallel.residuals import Residuals, restore_vjp, vjp_without
from meshpar.parallel.zero import gather, gradient_in_loop, in_loop, reduce_scatter

Known = dict[str, Any]
"""Arrays without gradient that scopes are made of."""


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
        make_scope: `Known` -> the scope that blocks see.
        padded: Whether a negative layer is a place without a block.
    """

    def __init__(
        self,
        group: BlockGroup,
        *,
        stored: Any,
        remat: str,
        make_scope: Callable[[Known], Any],
        padded: bool = False,
    ) -> None:
        self.group, self.remat = group, remat
        self._stored, self._padded = stored, padded
        self._apply = rematerialised(group.run, remat)
        self._make_scope = make_scope

    def forward(
        self, shard: Any, x: Stream, layer: jax.Array, known: Known
    ) -> tuple[Stream, Sums]:
        """The layer's output, and its sums.

        One all-gather over the batch axes for each parameter that is split there.

        Args:
            shard: One layer's parameters, this device's shards.
            x: The stream, this device's examples; the output is alike.
            layer: int32 scalar, below 0 for a place without a layer: `x` goes through.
            known: What the scope is made of.
        """
        weights = gather(self._stored, shard, in_loop)
        y, sums = self._call(weights, x, {**known, "layer": layer})
        return self._passed_on(y, sums, x, layer)

    def forward_keeping(
        self, shard: Any, x: Stream, layer: jax.Array, known: Known
    ) -> tuple[tuple[Stream, Sums], Residuals]:
        """`forward`, and what `backward` needs: no parameter is among it.

        Communicates as `forward`.
        """
        weights = gather(self._stored, shard, in_loop)
        known = {**known, "layer": layer}

        def run(weights: Any, x: Stream) -> tuple[tuple[Stream, Sums], Sums]:
            y, sums = self._call(weights, x, known)
            auxiliary = {name: sums.pop(name) for name in self.group.auxiliary}
            return (y, auxiliary), sums

        (y, auxiliary), residuals, others = vjp_without(
            run, (weights, x), known=(weights, known), has_aux=True
        )
        return self._passed_on(y, {**auxiliary, **others}, x, layer), residuals

    def backward(
        self,
        shard: Any,
        residuals: Residuals,
        dx: Stream,
        of_loss: jax.Array | float,
        layer: jax.Array,
        known: Known,
    ) -> tuple[Any, Stream]:
        """Gradients of one layer's parameters, and of its `x`.

        The all-gathers of `forward` again; then one reduce-scatter over the batch axes
        for each parameter whose gradient is split in the loop (`gradient_in_loop`): of
        its P values each device sends P (n-1)/n, in `Stored.sum_dtype`. Other
        gradients stay this device's own until the loop is done.

        Args:
            shard: As for `forward`.
            residuals: From `forward_keeping`.
            dx: Gradient of its output.
            of_loss: Gradient of the summed loss, auxiliary losses among it; a scalar.
            layer: As for `forward`.
            known: As for `forward`.

        Returns:
            Gradients shaped as one layer's parameters, split as they are added up; and
            that of `x`. Zeros and `dx` itself at a place without a layer.
        """
        weights = gather(self._stored, shard, in_loop)
        vjp = restore_vjp(residuals, (weights, {**known, "layer": layer}))
        of_sums = {
            name: jnp.float32(coefficient * of_loss)
            for name, coefficient in self.group.auxiliary.items()
        }
        gradients, dx = self._cut(vjp((dx, of_sums)), dx, layer)
        return reduce_scatter(self._stored, gradients, gradient_in_loop), dx

    def residual_names(
        self, shard: Any, x: Stream, layer: jax.Array, known: Known
    ) -> tuple[str, ...]:
        """The names that the block gives to residuals; nothing is run."""

        def run(shard: Any, x: Stream) -> tuple[Stream, Sums]:
            weights = gather(self._stored, shard, in_loop)
            scope = self._make_scope({**known, "layer": layer})
            return self.group.run(weights, x, scope)

        return names_in(run, shard, x)

    def _call(self, weights: Any, x: Stream, known: Known) -> tuple[Stream, Sums]:
        y, sums = self._apply(self._make_scope, weights, x, known)
        return y, dict(sums)

    def _passed_on(
        self, y: Stream, sums: Sums, x: Stream, layer: jax.Array
    ) -> tuple[Stream, Sums]:
        """A block's result, or its `x` where there is no block."""
        if not self._padded:
            return y, sums
        # Outside what is differentiated: `jnp.where` masks a NaN forward, not its
        # gradient, and a block's gradient may be NaN where all its weights are 0.
        here = layer >= 0
        return where(here, y, x), where(here, sums)

    def _cut(
        self, found: tuple[Any, Stream], dy: Stream, layer: jax.Array
    ) -> tuple[Any, Stream]:
        """Gradients of weights and `x`; zeros and `dy` where there is no block."""
        if not self._padded:
            return found
        (gradients, dx), here = found, layer >= 0
        return where(here, gradients), where(here, dx, dy)


def where(condition: jax.Array, tree: Any, other: Any = None) -> Any:
    """Every array of a tree, or that of another tree, 0 without one."""
    if other is None:
        return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), tree)
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), tree, other)
