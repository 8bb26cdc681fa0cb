"""A stage's forward of one microbatch beside a stage's backward of another.

One loop has layer i of the forward and layer L-1-i of the backward in its body, where
what experts send of the one stands beside matmuls of the other (`interleaved`). XLA
runs two loops one after the other. All ranks and chunks have as many places of a group,
so both have L; a place without a layer is computed and masked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.model.block_run import Sums
from meshpar.model.contract import Stream
from meshpar.parallel.blocks import (
    BACKWARD,
    FORWARD,
    Residuals,
    ScopeArrays,
    Stack,
    over_layers,
    run_keeping,
)
from meshpar.parallel.pipeline.crossing import write, zero_arrays
from meshpar.parallel.pipeline.rank_stages import RankStages
from meshpar.parallel.pipeline.split_stages import SplitStages
from meshpar.parallel.pipeline.stages import part
from meshpar.parallel.pipeline.work import At
from meshpar.trace.interleaved import Call, interleaved

PAIRED = (
    "experts: in a tick with both, layers run forward beside layers of another "
    "microbatch backward, each with the other's all-to-alls beside its matmuls; one "
    "more microbatch is in flight"
)
"""Note of an audit on a step whose ticks are paired."""


class _Into(NamedTuple):
    """Sums of a backward: those before it, and (sums, a layer, its place) -> sums."""

    total: Any
    put: Callable[[Any, Any, jax.Array], Any]


class _Layers(NamedTuple):
    """A group's layers of one microbatch.

    Args:
        stack: The layers.
        arrays: What scopes are made of.
        stream: What the first one takes, or the gradient of what the last one made.
        kept: Residuals that the backward takes.
    """

    stack: Stack
    arrays: ScopeArrays
    stream: Stream
    kept: Residuals | None = None


@dataclass(frozen=True, kw_only=True)
class PairedStages:
    """The stages of this rank, a forward beside a backward.

    Args:
        stages: Both; ranks do not skip layers, nor keep only a stage's input.
        group: Index of the group whose layers run side by side. Those of other groups
            run by themselves, before and after it in their pass.
        split: The stages' split backwards; None if they are whole.
    """

    stages: RankStages
    group: int
    split: SplitStages | None = None

    def run(
        self, forward: tuple, backward: tuple, once_known: Callable[..., Any]
    ) -> tuple[tuple, tuple]:
        """Return results of `run_keeping`, and of `gradient` or `input_gradient`.

        Args:
            forward: Arguments of `RankStages.run_keeping`.
            backward: Arguments of `RankStages.gradient`, or with `split` of
                `SplitStages.input_gradient`.
            once_known: `Executor.once_known`.
        """
        at, payload, buffers, slot = forward
        arrays = self.stages.scope_arrays(at.microbatch)
        of_backward: Any = None

        def through(
            group: int, stack: Stack, x: Stream
        ) -> tuple[Stream, Sums, Residuals]:
            nonlocal of_backward
            if group != self.group:
                return run_keeping(stack, x, arrays)
            made: Any = None

            def beside(theirs: _Layers, into: _Into) -> tuple[Stream, Any]:
                nonlocal made
                ours = _Layers(stack, arrays, x)
                made, *of_theirs = self._pair(ours, theirs, into, once_known)
                return tuple(of_theirs)

            # The backward has groups of its own before and after this one.
            at, buffers, slot, dy, *into = backward
            dy = once_known(dy, x)
            of_backward = self._gradient((at, buffers, slot, dy, *into), beside)
            y, *others = made
            return once_known(y, of_backward[0]), *others

        y, sums, kept = self.stages.through(at.chunk, arrays, payload, through)
        return (y, sums, self.stages.written(buffers, slot, kept)), of_backward

    def _gradient(
        self, given: tuple, beside: Callable[[_Layers, _Into], tuple[Stream, Any]]
    ) -> tuple:
        """Run the backward, the layers of `group` by `beside`."""
        stages, split = self.stages, self.split
        at, buffers, slot, dy, into, *stash_slots = given

        def backward(
            group: int, at: At, kept: Any, dy: Stream, arrays: ScopeArrays, into: Any
        ) -> tuple[Stream, Any]:
            of_group = group, at, kept, dy, arrays, into
            theirs = _Layers(stages.layers.stack(group, at.chunk), arrays, dy, kept)
            if split is None:
                if group != self.group:
                    return stages.group_gradient(*of_group)
                return beside(theirs, _Into(into, stages.adder(at)))
            if group != self.group:
                return split.group_gradient(*of_group, stash_slot=stash_slots[0])
            dx, found = beside(theirs, _Into(zero_arrays(split.stash()[group]), _put))
            return dx, write(into, stash_slots[0], found)

        return stages.gradient_by(at, buffers, slot, dy, into, backward=backward)

    def _pair(
        self,
        ours: _Layers,
        theirs: _Layers,
        into: _Into,
        once_known: Callable[..., Any],
    ) -> tuple[tuple[Stream, Sums, Residuals], Stream, Any]:
        """Run both loops in one.

        Returns:
            What `run_keeping` does, the gradient of the other one's input, and what
            `into` adds up.
        """
        last = len(ours.stack.layers) - 1

        def body(carry: tuple, place: jax.Array) -> tuple[tuple, tuple]:
            x, dy, total = carry
            back = last - place
            forward = Call(
                partial(_forward, ours.stack),
                (part(ours.stack.xs, place), ours.arrays),
                (x,),
            )
            backward = Call(
                partial(self._backward, theirs.stack),
                (part(theirs.stack.xs, back), theirs.arrays, self.stages.of_loss),
                (part(theirs.kept, back), dy),
            )
            made, (dx, found) = interleaved(forward, backward, once_known)
            (y, sums), kept = made
            return (y, dx, into.put(total, found, back)), (sums, kept)

        carry = ours.stream, theirs.stream, into.total
        (y, dx, total), (sums, kept) = lax.scan(body, carry, jnp.arange(last + 1))
        return (y, over_layers(ours.stack.block, sums), kept), dx, total

    def _backward(
        self,
        stack: Stack,
        xs: tuple,
        arrays: ScopeArrays,
        of_loss: Any,
        residuals: Residuals,
        dy: Stream,
    ) -> tuple[Stream, Any]:
        """Run a layer backward; return its reduced gradients, or its stash, too."""
        shard, state, layer = xs
        arrays = arrays._replace(state=state)
        with jax.named_scope(BACKWARD):
            weights = stack.block.gather(shard)
            if self.split is not None:
                known = weights, arrays, layer, of_loss
                one = self.split.layers[self.group]
                return one.input_gradient(known, residuals, dy)
            given = weights, residuals, dy, of_loss, layer, arrays
            gradients, dx = stack.block.backward(*given)
            return dx, stack.block.reduce(gradients)


def _forward(stack: Stack, xs: tuple, arrays: ScopeArrays, x: Stream) -> tuple:
    """Run a layer forward; return its output and sums, and its residuals."""
    shard, state, layer = xs
    with jax.named_scope(FORWARD):
        weights = stack.block.gather(shard)
        arrays = arrays._replace(state=state)
        return stack.block.forward_keeping(weights, x, layer, arrays)


def _put(stash: list[jax.Array], found: list[jax.Array], place: jax.Array) -> Any:
    return [
        buffer.at[place].set(value) for buffer, value in zip(stash, found, strict=True)
    ]
