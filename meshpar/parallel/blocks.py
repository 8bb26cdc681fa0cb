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

from meshpar.parallel.block import Block, Inputs, Sums
from meshpar.parallel.remat import refuse_unknown
from meshpar.parallel.residuals import Residuals
from meshpar.residual_names import is_named

# As JAX names the passes of what it differentiates, so that profiles and the audit tell
# them apart here too.
_FORWARD, _BACKWARD = "jvp(blocks)", "transpose(jvp(blocks))"


def run_blocks(
    block: Block, shards: Any, x: jax.Array, layers: jax.Array, inputs: Inputs
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
    block: Block, shards: Any, x: jax.Array, layers: jax.Array, inputs: Inputs
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
    inputs: Inputs,
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
    inputs: Inputs,
    totals: Any,
    add: Callable[[Any, Any, jax.Array], Any],
) -> tuple[jax.Array, Any]:
    """`run_backward` where nothing was kept but `x`: the forward runs a second time.

    Each layer's parameters are gathered in both passes of it: with the forward that was
    not kept, three times in all (`Block`).

    Args:
        block: What a layer does, and so the next as for `run_backward`.
        shards: Stacked parameters.
        x: (batch, seq, embed), the stack's input.
        dx: Gradient of its result, shaped as `x`.
        layers: The layer that each place holds.
        inputs: What scopes are made of.
        totals: Where gradients are added.
        add: As for `run_backward`.

    Returns:
        The gradient of `x`, and the totals.
    """
    y, _, residuals = run_keeping(block, shards, block.after(x, dx), layers, inputs)
    dx = block.after(dx, y)
    return run_backward(block, shards, residuals, dx, layers, inputs, totals, add)


def check_names(
    blocks: Sequence[tuple[Block, jax.Array, Any]], x: jax.Array, inputs: Inputs
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


def _over_layers(sums: Sums) -> Sums:
    return {name: jnp.sum(values) for name, values in sums.items()}
