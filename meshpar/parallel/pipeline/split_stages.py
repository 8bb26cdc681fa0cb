"""The backwards of a rank's stages in two: for the input (I), and for the weights (W).

Each layer's backward is cut in two programs (`split_backward`). An I runs the first of
every layer and leaves their stashes in a slot of buffers; the W of that microbatch runs
the second of every layer and adds up the gradients. What a forward keeps is needed for
I alone: the stash has what W needs of it. The W gathers a layer's split parameters if
it reads them, and reduces gradients as a whole backward does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.model.contract import Stream
from meshpar.parallel.blocks import BACKWARD, ScopeArrays, Stack
from meshpar.parallel.pipeline.crossing import Payload, read, write
from meshpar.parallel.pipeline.rank_layers import (
    Saved,
    for_places,
    layer_at,
    saved_residuals,
)
from meshpar.parallel.pipeline.rank_stages import RankStages
from meshpar.parallel.pipeline.split_backward import SplitProgram, split_program
from meshpar.parallel.pipeline.work import At


@dataclass(frozen=True)
class SplitLayer:
    """The backward of a layer of one group, in two.

    Args:
        program: (weights, scope's arrays, layer, gradient of the loss, residuals,
            gradient of its output) -> gradients of its input and of its weights.
        of_input: Tree of the first.
        of_weights: Tree of the second.
    """

    program: SplitProgram
    of_input: Any
    of_weights: Any

    def input_gradient(
        self, known: tuple, residuals: Any, dy: Stream
    ) -> tuple[Stream, list[jax.Array]]:
        """Return the gradient of the layer's input, and the stash."""
        arguments = jax.tree.leaves((known, residuals, dy))
        dx, stash = self.program.run_first(arguments)
        return jax.tree.unflatten(self.of_input, dx), stash

    def weight_gradient(self, known: tuple, stash: list[jax.Array]) -> Any:
        """Return the gradients of the layer's weights."""
        arguments = jax.tree.leaves(known)
        missing = len(self.program.second_reads) - len(arguments)
        shapes = self.program.second.in_avals[len(arguments) :][:missing]
        unread = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
        gradients = self.program.run_second([*arguments, *unread], stash)
        return jax.tree.unflatten(self.of_weights, gradients)


def split_layer(
    stack: Stack, residuals: Any, x: Any, arrays: ScopeArrays, of_loss: Any
) -> SplitLayer:
    """Return the two halves of a layer's backward.

    Args:
        stack: The layers.
        residuals: Shapes of what one layer's forward keeps.
        x: Shapes of the stream.
        arrays: What scopes are made of.
        of_loss: Gradient of the summed loss.
    """
    block = stack.block
    shard, state, layer = jax.tree.map(lambda value: value[0], stack.xs)
    arrays = arrays._replace(state=state)
    known = jax.eval_shape(lambda: (block.gather(shard), arrays, layer, of_loss))

    def backward(known: tuple, residuals: Any, dy: Stream) -> tuple[Stream, Any]:
        weights, arrays, layer, of_loss = known
        gradients, dx = block.backward(weights, residuals, dy, of_loss, layer, arrays)
        return dx, gradients

    traced, shapes = jax.make_jaxpr(backward, return_shape=True)(known, residuals, x)
    of_input, of_weights = map(jax.tree.structure, shapes)
    num_known, num_others = (len(jax.tree.leaves(of)) for of in (known, (residuals, x)))
    program = split_program(
        traced,
        [True] * of_input.num_leaves + [False] * of_weights.num_leaves,
        [True] * num_known + [False] * num_others,
    )
    return SplitLayer(program, of_input, of_weights)


@dataclass(frozen=True, kw_only=True)
class SplitStages:
    """The input and weight gradients of every stage that this rank runs.

    Args:
        stages: The stages, whose forwards and seams these are.
        layers: A layer of each group, in two.
    """

    stages: RankStages
    layers: list[SplitLayer]

    @classmethod
    def of(cls, stages: RankStages) -> SplitStages:
        """Cut the backward of a layer of each group of some stages."""
        arrays, first = stages.scope_arrays(jnp.int32(0)), jnp.int32(0)
        layers = []
        for group, residuals in enumerate(stages.layer_residuals()):
            stack, x = stages.layers.stack(group, first), stages.payloads.streams[group]
            layers.append(split_layer(stack, residuals, x, arrays, stages.of_loss))
        return cls(stages=stages, layers=layers)

    def stash(self) -> list[list[jax.ShapeDtypeStruct]]:
        """Return shapes of what an I leaves: of each group, (places, ...) each."""
        return [
            [
                jax.ShapeDtypeStruct((self._num_places(group), *one.shape), one.dtype)
                for one in layer.program.stash
            ]
            for group, layer in enumerate(self.layers)
        ]

    def input_gradient(
        self,
        at: At,
        buffers: Any,
        slot: jax.Array,
        of_payload: Payload,
        stash: list[Any],
        stash_slot: jax.Array,
    ) -> tuple[Payload, list[Any], Any]:
        """Run a stage backward for its input.

        Args:
            at: The action.
            buffers: From `RankStages.run_keeping`.
            slot: The slot that it wrote.
            of_payload: Gradient of the stage's output.
            stash: (slots, ...) for each array of `stash`.
            stash_slot: The slot to write; negative if the rank is idle.

        Returns:
            Gradient of its input, the stash, and gradients of the ends' parameters in
            `enter`; () if no group has it.
        """

        return self.stages.gradient_by(
            at,
            buffers,
            slot,
            of_payload,
            stash,
            backward=partial(self.group_gradient, stash_slot=stash_slot),
        )

    def group_gradient(
        self,
        group: int,
        at: At,
        kept: Any,
        dy: Stream,
        arrays: ScopeArrays,
        stash: Any,
        stash_slot: jax.Array,
    ) -> tuple[Stream, Any]:
        """Run a group's layers backward, each stash written into its slot."""
        run = self._input_gradient_in if self.stages.skips else self._input_gradient
        return run(group, at, kept, dy, arrays, stash, stash_slot)

    def weight_gradient(
        self, at: At, stash: list[Any], slot: jax.Array, totals: list[Any]
    ) -> list[Any]:
        """Add the gradients of a stage's parameters to the totals.

        Args:
            at: The action.
            stash: From `input_gradient`.
            slot: The slot that it wrote.
            totals: Gradients of each group so far, (chunks, places, ...).
        """
        arrays = self.stages.scope_arrays(at.microbatch)
        return [
            self._weight_gradient(group, at, arrays, stash[group], slot, totals[group])
            for group in range(len(self.layers))
        ]

    def _num_places(self, group: int) -> int:
        return len(self.stages.layers.stack(group, jnp.int32(0)).layers)

    def _known(
        self, stack: Stack, arrays: ScopeArrays, place: jax.Array | int
    ) -> tuple[Any, ...]:
        weights, layer, of_layer = layer_at(stack, arrays, place)
        return weights, of_layer, layer, self.stages.of_loss

    def _input_gradient(
        self,
        group: int,
        at: At,
        kept: Any,
        dy: Stream,
        arrays: ScopeArrays,
        stash: Any,
        slot: jax.Array,
    ) -> tuple[Stream, Any]:
        """Run all places of a group, last to first."""
        stack, layer = self.stages.layers.stack(group, at.chunk), self.layers[group]

        def one(dy: Stream, xs: tuple) -> tuple[Stream, list[jax.Array]]:
            place, residuals = xs
            known = self._known(stack, arrays, place)
            return layer.input_gradient(known, residuals, dy)

        xs = jnp.arange(self._num_places(group)), kept
        with jax.named_scope(BACKWARD):
            dx, found = lax.scan(one, dy, xs, reverse=True)
        return dx, write(stash, slot, found)

    def _input_gradient_in(
        self,
        group: int,
        at: At,
        kept: Saved,
        dy: Stream,
        arrays: ScopeArrays,
        stash: Any,
        slot: jax.Array,
    ) -> tuple[Stream, Any]:
        """Run the rank's own places, each stash written straight into the buffers."""
        stack, layer = self.stages.layers.stack(group, at.chunk), self.layers[group]
        num_layers = self.stages.layers.num_layers(group, at)
        slot = jnp.maximum(slot, 0)

        def one(carry: tuple, done: jax.Array) -> tuple:
            dy, stash = carry
            place = num_layers - 1 - done
            known = self._known(stack, arrays, place)
            dx, found = layer.input_gradient(known, saved_residuals(kept, place), dy)
            stash = [
                buffer.at[slot, place].set(value)
                for buffer, value in zip(stash, found, strict=True)
            ]
            return dx, stash

        with jax.named_scope(BACKWARD):
            return for_places(stack, num_layers, one, (dy, stash))

    def _weight_gradient(
        self,
        group: int,
        at: At,
        arrays: ScopeArrays,
        stash: list[jax.Array],
        slot: jax.Array,
        totals: Any,
    ) -> Any:
        stages, layer = self.stages, self.layers[group]
        stack, add = stages.layers.stack(group, at.chunk), stages.adder(at)

        def one(totals: Any, place: jax.Array, stash: list[jax.Array]) -> Any:
            known = self._known(stack, arrays, place)
            gradients = layer.weight_gradient(known, stash)
            return add(totals, stack.block.reduce(gradients), place)

        def one_place(totals: Any, place: jax.Array) -> Any:
            # XLA moves what no iteration changes before the loop, where idle ranks
            # compute it too: all of this with a single place.
            own_slot, _ = lax.optimization_barrier((slot, place))
            return one(totals, place, _at_place(stash, own_slot, place))

        def body(totals: Any, xs: tuple) -> tuple[Any, None]:
            return one(totals, *xs), None

        with jax.named_scope(BACKWARD):
            if stages.skips:
                num_layers = stages.layers.num_layers(group, at)
                return for_places(stack, num_layers, one_place, totals)
            xs = jnp.arange(self._num_places(group)), read(stash, slot)
            return lax.scan(body, totals, xs)[0]


def _at_place(
    buffers: list[jax.Array], slot: jax.Array, place: jax.Array
) -> list[jax.Array]:
    """Return the contents of a slot of buffers at one place."""
    return [buffer[jnp.maximum(slot, 0), place] for buffer in buffers]
