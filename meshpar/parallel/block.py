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
from meshpar.parallel.zero import (
    gather,
    gradient_in_loop,
    in_loop,
    reduce_scatter,
)

Known = dict[str, Any]
"""Arrays without gradient that scopes are made of."""


class Block:
    """One layer, as the loops call it.

    `gather` and `scatter` are what crosses the batch axes; the rest is this device's
    own. What GSPMD adds over its own mesh axes, such as `tensor`, stands in the model's
    functions (`parallel.tensor`).

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
        self._apply = {
            looped: rematerialised(group.run, remat, looped=looped)
            for looped in (True, False)
        }
        self._make_scope = make_scope

    @property
    def gathers(self) -> bool:
        """Whether `gather` communicates."""
        return any(map(in_loop, jax.tree.leaves(self._stored)))

    @property
    def scatters(self) -> bool:
        """Whether `scatter` communicates."""
        return any(map(gradient_in_loop, jax.tree.leaves(self._stored)))

    def gather(self, shard: Any) -> Any:
        """A layer's parameters for use, in the compute dtype.

        One all-gather over the batch axes for each parameter that is split there while
        the blocks run: of its P values a device receives the P (n-1)/n that it lacks.

        Args:
            shard: One layer's parameters, this device's shards.
        """
        return gather(self._stored, shard, in_loop)

    def scatter(self, gradients: Any) -> Any:
        """A layer's gradients as they are added up.

        One reduce-scatter over the batch axes for each parameter whose gradient is
        split in the loop (`gradient_in_loop`): of its P values each device sends
        P (n-1)/n, in `Stored.sum_dtype`. Other gradients stay this device's own until
        the loop is done.
        """
        return reduce_scatter(self._stored, gradients, gradient_in_loop)

    def forward(
        self, weights: Any, x: Stream, layer: jax.Array, known: Known
    ) -> tuple[Stream, Sums]:
        """The layer's output, and its sums.

        Args:
            weights: One layer's parameters, from `gather`.
            x: The stream, this device's examples; the output is alike.
            layer: int32 scalar, below 0 for a place without a layer: `x` goes through.
            known: What the scope is made of.
        """
        y, sums = self._call(weights, x, {**known, "layer": layer})
        return self._passed_on(y, sums, x, layer)

    def forward_keeping(
        self,
        weights: Any,
        x: Stream,
        layer: jax.Array,
        known: Known,
        *,
        looped: bool = True,
    ) -> tuple[tuple[Stream, Sums], Residuals]:
        """`forward`, and what `backward` needs: no parameter is among it.

        Args:
            weights: As for `forward`, and so the next three.
            x: The stream.
            layer: Its index.
            known: What the scope is made of.
            looped: Whether a loop is around it, and not around its backward.
        """
        known = {**known, "layer": layer}

        def run(weights: Any, x: Stream) -> tuple[tuple[Stream, Sums], Sums]:
            y, sums = self._call(weights, x, known, looped)
            auxiliary = {name: sums.pop(name) for name in self.group.auxiliary}
            return (y, auxiliary), sums

        (y, auxiliary), residuals, others = vjp_without(
            run, (weights, x), known=(weights, known), has_aux=True
        )
        return self._passed_on(y, {**auxiliary, **others}, x, layer), residuals

    def backward(
        self,
        weights: Any,
        residuals: Residuals,
        dx: Stream,
        of_loss: jax.Array | float,
        layer: jax.Array,
        known: Known,
    ) -> tuple[Any, Stream]:
        """Gradients of one layer's parameters, and of its `x`.

        Args:
            weights: As for `forward`.
            residuals: From `forward_keeping`.
            dx: Gradient of its output.
            of_loss: Gradient of the summed loss, auxiliary losses among it; a scalar.
            layer: As for `forward`.
            known: As for `forward`.

        Returns:
            Gradients shaped as the weights, for `scatter`; and that of `x`. Zeros and
            `dx` itself at a place without a layer.
        """
        vjp = restore_vjp(residuals, (weights, {**known, "layer": layer}))
        of_sums = {
            name: jnp.float32(coefficient * of_loss)
            for name, coefficient in self.group.auxiliary.items()
        }
        return self._cut(vjp((dx, of_sums)), dx, layer)

    def residual_names(
        self, shard: Any, x: Stream, layer: jax.Array, known: Known
    ) -> tuple[str, ...]:
        """The names that the block gives to residuals; nothing is run."""

        def run(shard: Any, x: Stream) -> tuple[Stream, Sums]:
            scope = self._make_scope({**known, "layer": layer})
            return self.group.run(self.gather(shard), x, scope)

        return names_in(run, shard, x)

    def _call(
        self, weights: Any, x: Stream, known: Known, looped: bool = True
    ) -> tuple[Stream, Sums]:
        y, sums = self._apply[looped](self._make_scope, weights, x, known)
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
