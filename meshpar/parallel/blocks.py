"""The loop over a model's blocks, forward and backward both written out.

The forward keeps each layer's residuals without its parameters; the backward gathers
the parameters again and reduce-scatters their gradients, layer by layer. So a split
parameter is whole for one layer at a time only, and gathered once in each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.collectives import Zero, follow, zero_on_parts
from meshpar.errors import InputError
from meshpar.model import BlockGroup
from meshpar.parallel.remat import names_in, refuse_unknown, rematerialised
from meshpar.parallel.residuals import Residuals, restore_vjp, vjp_without
from meshpar.parallel.zero import (
    gather,
    gradient_in_loop,
    in_loop,
    reduce_scatter,
    zero_from_all,
)
from meshpar.residual_names import is_named
from meshpar.scope import Scope

_Inputs = dict[str, Any]
Sums = dict[str, jax.Array]
"""Name of each auxiliary loss -> its sum, fp32."""

# As JAX names the passes of what it differentiates, so that profiles and the audit tell
# them apart here too.
_FORWARD, _BACKWARD = "jvp(blocks)", "transpose(jvp(blocks))"


def run_blocks(
    block: Block, shards: Any, x: jax.Array, layers: jax.Array, inputs: _Inputs
) -> tuple[jax.Array, Sums]:
    """`x` after every block of a stack, and the blocks' auxiliary losses.

    Args:
        block: What a layer does.
        shards: Stacked parameters as the loop takes them, this device's shards.
        x: (batch, seq, embed), this device's examples.
        layers: int32, the layer that each place of the stack holds.
        inputs: Arrays without gradient that scopes are made of.
    """

    def body(x: jax.Array, xs: tuple) -> tuple[jax.Array, Sums]:
        shard, layer = xs
        return block.forward(shard, x, layer, inputs)

    x, sums = lax.scan(body, x, (shards, layers))
    return x, _over_layers(sums)


def run_keeping(
    block: Block, shards: Any, x: jax.Array, layers: jax.Array, inputs: _Inputs
) -> tuple[jax.Array, Sums, Residuals]:
    """`run_blocks`, and what `run_backward` needs besides the arguments."""

    def body(x: jax.Array, xs: tuple) -> tuple[jax.Array, tuple[Sums, Residuals]]:
        shard, layer = xs
        (x, sums), residuals = block.forward_keeping(shard, x, layer, inputs)
        return x, (sums, residuals)

    with jax.named_scope(_FORWARD):
        x, (sums, residuals) = lax.scan(body, x, (shards, layers))
    return x, _over_layers(sums), residuals


def run_backward(
    block: Block,
    shards: Any,
    residuals: Residuals,
    dx: jax.Array,
    layers: jax.Array,
    inputs: _Inputs,
    totals: Any,
    add: Callable[[Any, Any, jax.Array], Any],
    *,
    of_loss: jax.Array | float = 1.0,
) -> tuple[jax.Array, Any]:
    """The backward of `run_keeping`, gradients added up in place, layer by layer.

    Args:
        block: As for `run_keeping`, and so the next.
        shards: Stacked parameters.
        residuals: What it kept.
        dx: Gradient of its result.
        layers: The layer that each place holds.
        inputs: What scopes are made of.
        totals: Where gradients are added.
        add: (totals, gradients of one layer's shards, place in the stack) -> totals.
        of_loss: Gradient of the summed loss, auxiliary losses among it.

    Returns:
        The gradient of its `x`, and the totals.
    """

    def body(carry: tuple, xs: tuple) -> tuple[tuple, None]:
        dx, totals = carry
        shard, residual, layer, place = xs
        gradients, dx = block.backward(shard, residual, dx, of_loss, layer, inputs)
        return (dx, add(totals, gradients, place)), None

    places = jnp.arange(len(layers))
    xs = (shards, residuals, layers, places)
    with jax.named_scope(_BACKWARD):
        return lax.scan(body, (dx, totals), xs, reverse=True)[0]


def run_again(
    block: Block,
    shards: Any,
    x: jax.Array,
    dx: jax.Array,
    layers: jax.Array,
    inputs: _Inputs,
    totals: Any,
    add: Callable[[Any, Any, jax.Array], Any],
) -> tuple[jax.Array, Any]:
    """`run_backward` where nothing was kept but `x`: the forward runs a second time."""
    y, _, residuals = run_keeping(block, shards, block.after(x, dx), layers, inputs)
    dx = block.after(dx, y)
    return run_backward(block, shards, residuals, dx, layers, inputs, totals, add)


def check_names(
    blocks: Sequence[tuple[Block, jax.Array, Any]], x: jax.Array, inputs: _Inputs
) -> None:
    """Refuses a policy of names that no block of a model gives.

    Args:
        blocks: Of each group: the block, its layers, their stacked parameters.
        x: As for `run_blocks`, and so the next.
        inputs: What scopes are made of.

    Raises:
        InputError: None gives them.
    """
    remat = blocks[0][0].remat
    if not is_named(remat):
        return
    known = [
        name
        for block, layers, shards in blocks
        for name in block.residual_names(
            jax.tree.map(lambda stack: stack[0], shards), x, layers[0], inputs
        )
    ]
    refuse_unknown(remat, known)


class Block:
    """One layer, as the loops call it.

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
        make_scope: Callable[[_Inputs], Scope],
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
        self, shard: Any, x: jax.Array, layer: jax.Array, inputs: _Inputs
    ) -> tuple[jax.Array, Sums]:
        weights, gathered = self._gather(shard, x)
        scope_inputs = {**inputs, "layer": layer}
        found = self._call(weights, follow(x, gathered), scope_inputs)
        return self._passed_on(found, x, layer)

    def forward_keeping(
        self, shard: Any, x: jax.Array, layer: jax.Array, inputs: _Inputs
    ) -> tuple[tuple[jax.Array, Sums], Residuals]:
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
        inputs: _Inputs,
    ) -> tuple[Any, jax.Array]:
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
        self, shard: Any, x: jax.Array, layer: jax.Array, inputs: _Inputs
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
        self, weights: Any, x: jax.Array, scope_inputs: _Inputs
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


def _over_layers(sums: Sums) -> Sums:
    return {name: jnp.sum(values) for name, values in sums.items()}
