"""The loop over a model's blocks, forward and backward both written out.

The forward keeps each layer's residuals without its parameters; the backward gathers
the parameters again and reduce-scatters their gradients, layer by layer. So a split
parameter is whole for one layer at a time only, and gathered once in each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.model.contract import Stream
from meshpar.model.sums import Sums
from meshpar.parallel.block import Block, Known
from meshpar.parallel.remat import refuse_unknown
from meshpar.parallel.residuals import Residuals
from meshpar.residual_names import is_named

# As JAX names the passes of what it differentiates, so that profiles and the audit tell
# them apart here too.
FORWARD, BACKWARD = "jvp(blocks)", "transpose(jvp(blocks))"


@dataclass(frozen=True)
class Stack:
    """Blocks of one kind, one after another.

    Args:
        block: What a layer does.
        shards: Stacked parameters as the loop takes them, this device's shards.
        state: Stacked state.
        layers: int32, the layer that each place of the stack holds.
        prefetch: Whether its loops are those of `meshpar.parallel.prefetch`, where any
            parameter is split in them.
    """

    block: Block
    shards: Any
    state: Any
    layers: jax.Array
    prefetch: bool = False

    @property
    def xs(self) -> tuple:
        """What a loop over the layers runs along."""
        return self.shards, self.state, self.layers

    @property
    def prefetches(self) -> bool:
        """Whether something is communicated ahead."""
        return self.prefetch and (self.block.gathers or self.block.scatters)


def run_blocks(stack: Stack, x: Stream, known: Known) -> tuple[Stream, Sums]:
    """`x` after every block of a stack, and the blocks' sums.

    Auxiliary losses are summed over the layers, other sums are stacked. Each layer's
    parameters are gathered (`Block.gather`).

    Args:
        stack: The blocks.
        x: The stream, this device's examples.
        known: Arrays without gradient that scopes are made of.
    """

    def body(x: Stream, xs: tuple) -> tuple[Stream, Sums]:
        shard, state, layer = xs
        weights = stack.block.gather(shard)
        return stack.block.forward(weights, x, layer, {**known, "state": state})

    x, sums = lax.scan(body, x, stack.xs)
    return x, over_layers(stack.block, sums)


def run_keeping(
    stack: Stack, x: Stream, known: Known
) -> tuple[Stream, Sums, Residuals]:
    """`run_blocks`, and what `run_backward` needs besides the arguments."""

    def body(x: Stream, xs: tuple) -> tuple[Stream, tuple[Sums, Residuals]]:
        shard, state, layer = xs
        (x, sums), residuals = stack.block.forward_keeping(
            stack.block.gather(shard), x, layer, {**known, "state": state}
        )
        return x, (sums, residuals)

    with jax.named_scope(FORWARD):
        x, (sums, residuals) = lax.scan(body, x, stack.xs)
    return x, over_layers(stack.block, sums), residuals


def run_backward(
    stack: Stack,
    residuals: Residuals,
    dx: Stream,
    known: Known,
    totals: Any,
    add: Callable[[Any, Any, jax.Array], Any],
    *,
    of_loss: jax.Array | float,
) -> tuple[Stream, Any]:
    """The backward of `run_keeping`, gradients added up in place, layer by layer.

    Each layer's parameters are gathered once more, and its gradients reduce-scattered
    (`Block.scatter`).

    Args:
        stack: As for `run_keeping`.
        residuals: What it kept.
        dx: Gradient of its result.
        known: What scopes are made of.
        totals: Where gradients are added.
        add: (totals, gradients of one layer's shards, place in the stack) -> totals.
        of_loss: Gradient of the summed loss, auxiliary losses among it.

    Returns:
        The gradient of its `x`, and the totals.
    """

    def body(carry: tuple, xs: tuple) -> tuple[tuple, None]:
        dx, totals = carry
        (shard, state, layer), residual, place = xs
        gradients, dx = stack.block.backward(
            stack.block.gather(shard),
            residual,
            dx,
            of_loss,
            layer,
            {**known, "state": state},
        )
        return (dx, add(totals, stack.block.scatter(gradients), place)), None

    xs = (stack.xs, residuals, jnp.arange(len(stack.layers)))
    with jax.named_scope(BACKWARD):
        return lax.scan(body, (dx, totals), xs, reverse=True)[0]


def check_names(stacks: Sequence[tuple[Stack, Stream]], known: Known) -> None:
    """Refuses a policy of names that no block of a model gives.

    Args:
        stacks: Of each group: its blocks, and the stream that they take.
        known: What scopes are made of.

    Raises:
        InputError: None gives them.
    """
    remat = stacks[0][0].block.remat
    if not is_named(remat):
        return
    names: list[str] = []
    for stack, x in stacks:
        first = jax.tree.map(lambda value: value[0], (stack.shards, stack.state))
        of_layer = {**known, "state": first[1]}
        names += stack.block.residual_names(first[0], x, stack.layers[0], of_layer)
    refuse_unknown(remat, names)


def over_layers(block: Block, sums: Sums) -> Sums:
    """Auxiliary losses summed over the layers; other sums as they are."""
    return {
        name: jnp.sum(values) if name in block.group.auxiliary else values
        for name, values in sums.items()
    }
