"""The loop over the layers of a rank's stage, left at once where the rank is idle.

Ranks agree on nothing here: one runs its layers while another runs none. So no
collective in a layer may need a rank of another stage, and none may be a
collective-permute, for which XLA:CPU waits for all devices (`idle`). A `while_loop`,
as `lax.cond` copies on GPUs what it hands through: residuals and gradients are written
where they stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.model.block_run import Sums
from meshpar.model.contract import Stream
from meshpar.parallel.blocks import BACKWARD, FORWARD, Known, Stack, over_layers
from meshpar.parallel.pipeline.stages import part


class Saved(NamedTuple):
    """Where `keep_layers` wrote.

    Args:
        buffers: (slots, places, ...) of every residual of a layer.
        slot: In which of them.
        treedef: What a layer's residuals are a tree of.
    """

    buffers: list[jax.Array]
    slot: jax.Array
    treedef: Any


def run_layers(
    stack: Stack, x: Stream, known: Known, num_layers: jax.Array
) -> tuple[Stream, Sums]:
    """`run_blocks` of so many places; sums of the others are 0."""

    def forward(x: Stream, place: jax.Array | int) -> tuple:
        weights, layer, of_layer = _layer(stack, known, place)
        return stack.block.forward(weights, x, layer, of_layer), ()

    x, sums, _ = _forwards(stack, x, num_layers, forward, [], jnp.int32(0))
    return x, over_layers(stack.block, sums)


def keep_layers(
    stack: Stack,
    x: Stream,
    known: Known,
    num_layers: jax.Array,
    saved: list[jax.Array],
    slot: jax.Array,
) -> tuple[Stream, Sums, list[jax.Array]]:
    """The same, and in a slot of the buffers what `backward_layers` needs.

    Args:
        stack: The layers.
        x: The stream.
        known: What scopes are made of.
        num_layers: How many run.
        saved: (slots, places, ...) of every residual of a layer.
        slot: Where to write.
    """

    def forward(x: Stream, place: jax.Array | int) -> tuple:
        weights, layer, of_layer = _layer(stack, known, place)
        return stack.block.forward_keeping(weights, x, layer, of_layer)

    with jax.named_scope(FORWARD):
        x, sums, saved = _forwards(stack, x, num_layers, forward, saved, slot)
    return x, over_layers(stack.block, sums), saved


def backward_layers(
    stack: Stack,
    saved: Saved,
    dx: Stream,
    known: Known,
    num_layers: jax.Array,
    totals: Any,
    add: Callable[[Any, Any, jax.Array], Any],
    *,
    of_loss: jax.Array | float,
) -> tuple[Stream, Any]:
    """`run_backward` of so many places, after `keep_layers`."""

    def one(carry: tuple, done: jax.Array) -> tuple:
        dx, totals = carry
        place = num_layers - 1 - done
        weights, layer, of_layer = _layer(stack, known, place)
        kept = [_at(buffer, saved.slot, place) for buffer in saved.buffers]
        residuals = jax.tree.unflatten(saved.treedef, kept)
        gradients, dx = stack.block.backward(
            weights, residuals, dx, of_loss, layer, of_layer
        )
        return dx, add(totals, stack.block.scatter(gradients), place)

    with jax.named_scope(BACKWARD):
        return _for_places(stack, num_layers, one, (dx, totals))


def _layer(
    stack: Stack, known: Known, place: jax.Array | int
) -> tuple[Any, jax.Array, Known]:
    """A layer's parameters for use, its index, and what its scope is made of."""
    shard, state, layer = part(stack.xs, place)
    return stack.block.gather(shard), layer, {**known, "state": state}


def _forwards(
    stack: Stack,
    x: Stream,
    num_layers: jax.Array,
    forward: Callable[[Stream, jax.Array | int], tuple],
    saved: list[jax.Array],
    slot: jax.Array,
) -> tuple[Stream, Sums, list[jax.Array]]:
    """`forward` of so many places, their residuals written to a slot of the buffers.

    The sums are those of each place.
    """

    def one(carry: tuple, place: jax.Array) -> tuple:
        x, sums, saved = carry
        (x, found), residuals = forward(x, place)
        sums = jax.tree.map(lambda of, one: of.at[place].set(one), sums, found)
        saved = [
            buffer.at[slot, place].set(value)
            for buffer, value in zip(saved, jax.tree.leaves(residuals), strict=True)
        ]
        return x, sums, saved

    sums = jax.tree.map(
        lambda one: jnp.zeros((len(stack.layers), *one.shape), one.dtype),
        jax.eval_shape(lambda x: forward(x, 0)[0][1], x),
    )
    return _for_places(stack, num_layers, one, (x, sums, saved))


def _for_places(
    stack: Stack,
    num_layers: jax.Array,
    one: Callable[[Any, jax.Array], Any],
    carry: Any,
) -> Any:
    num_places = len(stack.layers)

    def goes_on(carry: tuple) -> jax.Array:
        # The constant tells the audit how often the loop runs at most.
        return (carry[0] < num_places) & (carry[0] < num_layers)

    return lax.while_loop(
        goes_on,
        lambda carry: (carry[0] + 1, one(carry[1], carry[0])),
        (jnp.int32(0), carry),
    )[1]


def _at(buffer: jax.Array, slot: jax.Array, place: jax.Array) -> jax.Array:
    start = [slot, place, *[jnp.int32(0)] * (buffer.ndim - 2)]
    sizes = (1, 1, *buffer.shape[2:])
    return lax.dynamic_slice(buffer, start, sizes).reshape(buffer.shape[2:])
