"""Prefetch: loops over blocks whose communication overlaps with another block.

A layer's weights are gathered while the layer before it in the pass computes, and its
gradients are reduced while the layer after it does; for L layers of FSDP

    forward   gather 0 | run 0, gather 1 | ... | run L-1
    backward  run L-1, gather L-2 | run L-2, gather L-3, reduce L-1 | ...
              | run 0, reduce 1 | reduce 0

`zero=1` and `2` keep what the forward gathered, and the backward gathers nothing;
`zero=0` gathers nothing at all.

Every collective is issued before its result is needed, because XLA only moves
collectives beside work of the same iteration of a loop. Of FSDP two layers' weights
are whole at a time, and one layer's gradients. The last layer's weights stay from its
forward to its backward; in turn the backward's loop gathers layer 0 twice, so as many
bytes are sent as without prefetch.
Reference: Zhao et al. 2023, "PyTorch FSDP", section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.model.block_run import Sums
from meshpar.model.contract import Stream
from meshpar.parallel.blocks import BACKWARD, FORWARD, ScopeArrays, Stack, over_layers
from meshpar.parallel.placement import Placement


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """Residuals of a forward for its backward.

    Args:
        others: Stacked residuals of all layers but the last; None for a single layer.
        last: Residuals of the last layer, kept separately because joining would copy.
        weights: Gathered weights of the last layer.
        other_weights: Stacked ones of the others, if the stack keeps them.
    """

    others: Any
    last: Any
    weights: Any
    other_weights: Any


def run_blocks(
    stack: Stack, x: Stream, arrays: ScopeArrays, overlapped: Any = ()
) -> tuple[Stream, Sums, Any]:
    """Run all blocks, as `blocks.run_blocks`, with prefetch.

    Args:
        stack: The blocks.
        x: The stream of this device's examples.
        arrays: Arrays without gradient that scopes are made of.
        overlapped: Arrays that the caller communicates beside the last layer; they come
            back behind a barrier after the other layers.

    Returns:
        The last layer's output, the sums, and `overlapped`.
    """

    def run(weights: Any, x: Stream, place: Any, _: bool) -> tuple[Stream, Sums]:
        return stack.block.forward(weights, x, *_layer(stack, place, arrays))

    stack = replace(stack, keep=False)
    x, others, (last, _), overlapped = _forward(stack, run, x, overlapped)
    sums = _joined(others and others[0], last)
    return x, over_layers(stack.block, sums), overlapped


def run_keeping(
    stack: Stack, x: Stream, arrays: ScopeArrays, overlapped: Any = ()
) -> tuple[Stream, Sums, Kept, Any]:
    """Run all blocks, and keep residuals for `run_backward`.

    Returns:
        The last layer's output, the sums, the residuals, and `overlapped`.
    """

    def run(
        weights: Any, x: Stream, place: Any, looped: bool
    ) -> tuple[Stream, tuple[Sums, Any]]:
        (x, sums), residuals = stack.block.forward_keeping(
            weights, x, *_layer(stack, place, arrays), looped=looped
        )
        return x, (sums, residuals)

    with jax.named_scope(FORWARD):
        x, others, last, overlapped = _forward(stack, run, x, overlapped)
    (other_sums, residuals), gathered = others or ((None, None), None)
    (last_sums, last_residuals), last_gathered = last
    kept = Kept(residuals, last_residuals, last_gathered, gathered)
    sums = _joined(other_sums, last_sums)
    return x, over_layers(stack.block, sums), kept, overlapped


def run_backward(
    stack: Stack,
    kept: Kept,
    dx: Stream,
    arrays: ScopeArrays,
    totals: Any,
    add: Callable[[Any, Any, Any], Any],
    *,
    of_loss: jax.Array | float,
    overlapped: Any = (),
) -> tuple[Stream, Any, Any]:
    """Run the backward of `run_keeping`, as `blocks.run_backward`, with prefetch.

    Communication of `overlapped` overlaps with the last layer, and ends before others.

    Returns:
        The gradient of its `x`, the totals, and `overlapped`.
    """
    block = stack.block

    def run(gathered: Any, residuals: Any, dx: Stream, place: Any) -> tuple:
        layer = _layer(stack, place, arrays)
        weights = _weights(stack, gathered, place)
        return block.backward(weights, residuals, dx, of_loss, *layer)

    def body(carry: tuple, place: jax.Array) -> tuple[tuple, None]:
        dx, totals, gathered, late = carry
        following: list[jax.Array] = []
        if stack.keep:
            gathered = _at(kept.other_weights, place)
        else:
            place_before = jnp.maximum(place - 1, 0)
            following, (dx, late) = _gather(stack, place_before, before=(dx, late))
        sent = block.reduce(late), following
        late, dx = run(gathered, _at(kept.others, place), dx, place)
        if stack.sends_rows:
            # What experts send comes first: without the barrier XLA waits for the rest
            # before the last matmuls, which then have nothing beside them.
            (late, dx), sent = lax.optimization_barrier(((late, dx), sent))
        reduced, following = sent
        totals = add(totals, reduced, place + 1)
        return (dx, totals, following, late), None

    last = len(stack.layers) - 1
    with jax.named_scope(BACKWARD):
        following: list[jax.Array] = []
        if last and not stack.keep:
            # The barrier delays the gather until there is work to overlap with it.
            dx, shard = lax.optimization_barrier((dx, _at(stack.shards, last - 1)))
            following, _ = block.gather_split(shard)
        late, dx = run(kept.weights, kept.last, dx, last)
        dx, overlapped = lax.optimization_barrier((dx, overlapped))
        if last:
            carry = (dx, totals, following, late)
            carry, _ = lax.scan(body, carry, jnp.arange(last), reverse=True)
            dx, totals, _, late = carry
        return dx, add(totals, block.reduce(late), 0), overlapped


class Reduction(Protocol):
    """How totals of gradients are reduced, layer by layer."""

    def reduced(self, totals: Any, place: Any) -> Any:
        """Return a layer's totals, summed over devices."""

    def replaced(self, totals: Any, results: Any, place: Any) -> Any:
        """Return the totals with results of `reduced` in a layer's place."""


def run_last_backward(
    stack: Stack,
    residuals: Any,
    dx: Stream,
    arrays: ScopeArrays,
    totals: Any,
    add: Callable[[Any, Any, Any], Any],
    reduction: Reduction,
    *,
    of_loss: jax.Array | float,
    overlapped: Any = (),
) -> tuple[Stream, Any, Any]:
    """Run `blocks.run_backward`, and reduce each layer's total beside the next layer.

    Args:
        stack: The blocks.
        residuals: From `blocks.run_keeping`.
        dx: Gradient of its stream.
        arrays: Arrays that scopes are made of.
        totals: Sums of gradients so far.
        add: As for `blocks.run_backward`.
        reduction: How a layer's total is reduced.
        of_loss: Gradient of the summed loss.
        overlapped: As for `run_backward`.

    Returns:
        The gradient of `x`, the reduced totals, and `overlapped`.
    """

    def one(dx: Stream, totals: Any, place: Any) -> tuple[Stream, Any]:
        shard, residual = _at((stack.shards, residuals), place)
        gradients, dx = stack.block.backward(
            stack.block.gather(shard),
            residual,
            dx,
            of_loss,
            *_layer(stack, place, arrays),
        )
        return dx, add(totals, stack.block.reduce(gradients), place)

    def body(carry: tuple, place: jax.Array) -> tuple[tuple, None]:
        dx, totals = carry
        late = reduction.reduced(totals, place + 1)
        dx, totals = one(dx, totals, place)
        return (dx, reduction.replaced(totals, late, place + 1)), None

    last = len(stack.layers) - 1
    with jax.named_scope(BACKWARD):
        dx, totals = one(dx, totals, last)
        dx, overlapped = lax.optimization_barrier((dx, overlapped))
        if last:
            carry = dx, totals
            carry, _ = lax.scan(body, carry, jnp.arange(last), reverse=True)
            dx, totals = carry
        totals = reduction.replaced(totals, reduction.reduced(totals, 0), 0)
        return dx, totals, overlapped


def _forward(
    stack: Stack,
    run: Callable[[Any, Stream, Any, bool], tuple[Stream, Any]],
    x: Stream,
    overlapped: Any,
) -> tuple[Stream, Any, Any, Any]:
    """Run a forward over the layers.

    Args:
        stack: The blocks.
        run: (weights, `x`, place, is in a loop) -> (next `x`, output of the layer).
        x: The stream.
        overlapped: As for `run_blocks`.

    Returns:
        The last layer's `x`; pairs of output and gathered weights, stacked of the
        other layers, whose weights are None unless the stack keeps them, and of the
        last; `overlapped`.
    """

    def body(carry: tuple, place: jax.Array) -> tuple[tuple, Any]:
        x, gathered = carry
        following, x = _gather(stack, place + 1, before=x)
        x, output = run(_weights(stack, gathered, place), x, place, True)
        return (x, following), (output, gathered if stack.keep else None)

    last, others = len(stack.layers) - 1, None
    gathered, _ = _gather(stack, 0)
    if last:
        (x, gathered), others = lax.scan(body, (x, gathered), jnp.arange(last))
    x, overlapped = lax.optimization_barrier((x, overlapped))
    x, output = run(_weights(stack, gathered, last), x, last, False)
    return x, others, (output, gathered), overlapped


def _gather(stack: Stack, place: Any, before: Any = ()) -> tuple[list[jax.Array], Any]:
    return stack.block.gather_split(_at(stack.shards, place), before)


def _weights(stack: Stack, gathered: Any, place: Any) -> Any:
    return stack.block.joined(gathered, _at(stack.shards, place))


def _layer(
    stack: Stack, place: Any, arrays: ScopeArrays
) -> tuple[jax.Array, ScopeArrays]:
    """Return a layer's index, and the arrays that its scope is made of."""
    return stack.layers[place], arrays._replace(state=_at(stack.state, place))


def _at(tree: Any, place: Any) -> Any:
    return jax.tree.map(lambda value: value[place], tree)


def _joined(others: Sums | None, last: Sums) -> Sums:
    """Stack the sums of all layers."""
    last = jax.tree.map(lambda value: value[None], last)
    if others is None:
        return last
    return jax.tree.map(lambda *of: jnp.concatenate(of), others, last)


def prefetch_notes(placement: Placement) -> tuple[str, ...]:
    """Return a line for each prefetch that the layout's defaults leave out."""
    if not placement.communicates_in_loop or placement.layout.fsdp_prefetch == "off":
        return ()
    if placement.layout.runs_in_ticks:
        uneven = placement.layout.data_splits
        sums = "" if uneven else "but for sums of gradients in the last one; "
        return (
            "fsdp_prefetch: not where a step runs in ticks (stages or microbatches), "
            f"{sums}each block's parameters are gathered when it begins",
        )
    if not placement.prefetches:
        return (
            "fsdp_prefetch: not on cpu, whose compiler starts no collective ahead; "
            "fsdp_prefetch=on takes the loop of GPUs and TPUs",
        )
    if any(group.enter for group in placement.model.groups):
        return (
            "fsdp_prefetch: all parameters outside the blocks are gathered before the "
            "first block, because a later group of blocks has an `enter`",
        )
    return ()
