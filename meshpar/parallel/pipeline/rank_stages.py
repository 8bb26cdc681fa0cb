"""The stages of one rank, for one microbatch at a time, as the executor calls them.

A stage may hold layers of several groups of blocks (`rank_layers`), with seams between
them (`group_seams`). What passes between stages is a payload of the streams that cross
there (`payloads`); a rank takes the one that its first layer wants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.model.block_run import Sums
from meshpar.model.contract import Stream
from meshpar.parallel.blocks import (
    Known,
    Residuals,
    Stack,
    check_names,
    run_backward,
    run_blocks,
    run_keeping,
)
from meshpar.parallel.pipeline.buffers import read, write
from meshpar.parallel.pipeline.group_seams import GroupSeams
from meshpar.parallel.pipeline.idle import layers_hindrance, tell
from meshpar.parallel.pipeline.layer_loops import (
    Saved,
    backward_layers,
    keep_layers,
    run_layers,
)
from meshpar.parallel.pipeline.payloads import Payloads, zeros_of
from meshpar.parallel.pipeline.rank_layers import RankLayers
from meshpar.parallel.pipeline.work import At, Payload


@dataclass(frozen=True, kw_only=True)
class RankStages:
    """The blocks of every stage that this rank runs.

    Args:
        seams: What happens between two groups.
        known: Microbatch -> arrays without gradient that scopes are made of.
        keeps_input: Whether a stage's input is all that is kept for its backward.
        skips: Whether an idle rank leaves its layers out (`idle`); else it computes
            them on zeros.
        of_loss: Gradient of the summed loss, auxiliary losses among it.
    """

    seams: GroupSeams
    known: Callable[[jax.Array], Known]
    keeps_input: bool = False
    skips: bool = False
    of_loss: jax.Array | float = 1.0

    @property
    def layers(self) -> RankLayers:
        """Which layers this rank has, of each group."""
        return self.seams.layers

    @property
    def payloads(self) -> Payloads:
        """What passes between stages."""
        return self.seams.payloads

    def may_skip(self) -> bool:
        """Whether an idle rank may leave the layers out; where not, a warning says why.

        Nothing is run.
        """
        known, first = self.known(jnp.int32(0)), jnp.int32(0)
        for group, block in enumerate(self.layers.blocks):
            stream = self.payloads.streams[group]
            found = layers_hindrance(self.layers.stack(group, first), stream, known)
            if found is not None:
                tell(block.group.name, found)
                return False
        return True

    def run(self, at: At, payload: Payload) -> tuple[Payload, tuple]:
        """A microbatch through one of the stages, and the sums of its blocks."""
        known = self.known(at.microbatch)

        def through(group: int, stack: Stack, x: Stream) -> tuple[Stream, Sums, None]:
            if self.skips:
                num_layers = self.layers.num_layers(group, at)
                return *run_layers(stack, x, known, num_layers), None
            return *run_blocks(stack, x, known), None

        return self._through(at.chunk, known, payload, through)[:2]

    def kept(self, payload: Payload) -> Any:
        """Shapes of what `gradient` needs of a stage's run: trees of plain lists."""
        return payload if self.keeps_input else _plain(self._kept(payload))

    def run_keeping(
        self, at: At, payload: Payload, buffers: Any, slot: jax.Array
    ) -> tuple[Payload, tuple, Any]:
        """`run`, and what `gradient` needs of it in a slot of the buffers.

        Args:
            at: What to run.
            payload: What the stage takes.
            buffers: (slots, ...) for each array of `kept`.
            slot: Where to write; negative where the rank is idle.
        """
        if self.keeps_input:
            return *self.run(at, payload), write(buffers, slot, payload)
        known = self.known(at.microbatch)
        if self.skips:
            return self._run_keeping_in(at, known, payload, buffers, slot)
        y, sums, kept = self._run_keeping(at.chunk, known, payload)
        return y, sums, write(buffers, slot, _plain(kept))

    def gradient(
        self,
        at: At,
        buffers: Any,
        slot: jax.Array,
        of_payload: Payload,
        totals: list[Any],
    ) -> tuple[Payload, list[Any], Any]:
        """The gradient of the stage's payload; its parameters' are added to the totals.

        Args:
            at: What was run.
            buffers: From `run_keeping`.
            slot: Where it wrote.
            of_payload: Gradient of the stage's output.
            totals: Of each group: where gradients are added, (chunks, places, ...).

        Returns:
            The gradient of its input, the totals, and gradients of the ends' parameters
            in `enter`; () where no group has it.
        """
        known, totals = self.known(at.microbatch), list(totals)
        kept = self._restored(at, known, buffers, slot)
        found = zeros_of(self.payloads.shapes)
        of_ends: Any = ()
        of_next: Any = None
        for group in reversed(range(len(self.layers.blocks))):
            entered, residuals = kept[group]
            dy = self.seams.gradient_out(group, at.chunk, of_payload, of_next)
            dx, totals[group] = self._backward(
                group, at, residuals, dy, known, totals[group]
            )
            of_next, found, more = self.seams.gradient_in(
                group, at.chunk, dx, found, entered, known
            )
            if more is not None:
                of_ends = more if not of_ends else jax.tree.map(jnp.add, of_ends, more)
        return found, totals, of_ends

    def _run_keeping(
        self, chunk: jax.Array, known: Known, payload: Payload
    ) -> tuple[Payload, tuple, Any]:
        checked = []

        def through(_: int, stack: Stack, x: Stream) -> tuple[Stream, Sums, Any]:
            checked.append((stack, x))
            return run_keeping(stack, x, known)

        found = self._through(chunk, known, payload, through)
        check_names(checked, known)
        return found

    def _run_keeping_in(
        self, at: At, known: Known, payload: Payload, buffers: Any, slot: jax.Array
    ) -> tuple[Payload, tuple, Any]:
        """`_run_keeping`, each layer's residuals straight into the buffers."""

        def through(group: int, stack: Stack, x: Stream) -> tuple[Stream, Sums, list]:
            num_layers, (_, saved) = self.layers.num_layers(group, at), buffers[group]
            return keep_layers(stack, x, known, num_layers, saved, jnp.maximum(slot, 0))

        y, sums, kept = self._through(at.chunk, known, payload, through)
        written = [
            [write(of_enter, slot, jax.tree.leaves(entered)), of_layers]
            for (of_enter, _), (entered, of_layers) in zip(buffers, kept, strict=True)
        ]
        return y, sums, written

    def _kept(self, payload: Payload) -> list[tuple[Residuals | None, Residuals]]:
        """Shapes of what is kept: of each group, of `enter` and of its layers."""
        first = jnp.int32(0)
        return jax.eval_shape(
            lambda x: self._run_keeping(first, self.known(first), x)[2], payload
        )

    def _restored(
        self, at: At, known: Known, buffers: Any, slot: jax.Array
    ) -> list[tuple[Residuals | None, Any]]:
        """What was kept, of each group: of `enter`, and what `_backward` takes."""
        payload = self.payloads.shapes
        if self.keeps_input and not self.skips:
            return self._run_keeping(at.chunk, known, read(buffers, slot))[2]
        shapes = self._kept(payload)
        if self.keeps_input:
            taken, slot = read(buffers, slot), jnp.int32(0)
            buffers = jax.tree.map(
                lambda one: jnp.zeros((1, *one.shape), one.dtype), _plain(shapes)
            )
            buffers = self._run_keeping_in(at, known, taken, buffers, slot)[2]
        if not self.skips:
            kept = jax.tree.leaves(read(buffers, slot))
            return jax.tree.unflatten(jax.tree.structure(shapes), kept)
        return [
            (
                jax.tree.unflatten(jax.tree.structure(entered), read(of_enter, slot)),
                Saved(of_layers, jnp.maximum(slot, 0), jax.tree.structure(residuals)),
            )
            for (entered, residuals), (of_enter, of_layers) in zip(
                shapes, buffers, strict=True
            )
        ]

    def _backward(
        self,
        group: int,
        at: At,
        kept: Any,
        dx: Stream,
        known: Known,
        totals: Any,
    ) -> tuple[Stream, Any]:
        """A group's layers backwards, their gradients added to the totals."""
        stack = self.layers.stack(group, at.chunk)
        if self.skips:
            num_layers = self.layers.num_layers(group, at)
            add = _adder(at.chunk)
            return backward_layers(
                *(stack, kept, dx, known, num_layers, totals, add), of_loss=self.of_loss
            )
        add = _adder(at.chunk, counts=at.at_work)
        return run_backward(
            *(stack, kept, dx, known, totals, add), of_loss=self.of_loss
        )

    def _through(
        self,
        chunk: jax.Array,
        known: Known,
        payload: Payload,
        through: Callable[[int, Stack, Stream], tuple[Stream, Sums, Any]],
    ) -> tuple[Payload, tuple, list]:
        """Every group in turn; the payload out, the sums, and what each kept.

        That is, of `enter` and of its layers as `through` runs them.
        """
        out, y, auxiliary, statistics, kept = None, None, [], [], []
        for group, block in enumerate(self.layers.blocks):
            x = self.payloads.stream(group, payload)
            x, entered = self.seams.entered(group, chunk, x, (payload, y), known)
            y, sums, of_layers = through(group, self.layers.stack(group, chunk), x)
            names = block.group.auxiliary
            auxiliary.append({name: sums[name] for name in names})
            statistics.append({k: v for k, v in sums.items() if k not in names})
            kept.append((entered, of_layers))
            if group in self.layers.arrangement.crossing:
                mine = self.seams.left(group, chunk, y)
                out = mine if out is None else jax.tree.map(jnp.add, out, mine)
        return out, (auxiliary, statistics), kept


def _adder(chunk: jax.Array, *, counts: jax.Array | None = None) -> Callable[..., Any]:
    """What adds a layer's gradients to the totals, where they count."""

    def add(totals: Any, gradients: Any, place: jax.Array) -> Any:
        def one(total: jax.Array, gradient: jax.Array) -> jax.Array:
            gradient = gradient.astype(total.dtype)
            if counts is not None:
                gradient = jnp.where(counts, gradient, 0)
            return total.at[chunk, place].add(gradient)

        return jax.tree.map(one, totals, gradients)

    return add


def _plain(kept: list[tuple[Residuals | None, Residuals]]) -> Any:
    """The arrays alone: of each group those of `enter`, and those of its layers."""
    return [[jax.tree.leaves(one) for one in of_group] for of_group in kept]
