"""The stages of one rank, for one microbatch at a time, as the executor calls them.

A stage may hold layers of several groups of blocks, and every rank runs the same
program: of each group as many places as the stage with most of its layers. What passes
between stages is a tuple of the streams that cross there; a rank takes the one that its
first layer wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.model.contract import Stream
from meshpar.model.parameter import Params
from meshpar.model.sums import Sums
from meshpar.parallel.block import Block, Known, where
from meshpar.parallel.blocks import (
    Stack,
    check_names,
    run_backward,
    run_blocks,
    run_keeping,
)
from meshpar.parallel.pipeline.buffers import read, write
from meshpar.parallel.pipeline.ends import STAGE
from meshpar.parallel.pipeline.idle import layers_hindrance, tell
from meshpar.parallel.pipeline.layer_loops import (
    Saved,
    backward_layers,
    keep_layers,
    run_layers,
)
from meshpar.parallel.pipeline.stages import NO_LAYER, Arrangement, part
from meshpar.parallel.pipeline.work import At, Payload
from meshpar.parallel.residuals import Residuals, restore_vjp, vjp_without

Enter = Callable[[Params, Stream, Known], Stream]
"""(ends' parameters, stream of the group before, what scopes are made of) -> stream."""


@dataclass(frozen=True, kw_only=True)
class RankStages:
    """The blocks of every stage that this rank runs.

    Args:
        blocks: Of each group, what a layer does.
        enters: Of each group but the first, what makes its stream; None where it is
            that of the group before.
        params: Of each group, the parameters as stored, (chunks, places, ...).
        states: Of each group, its state, alike.
        weights: The ends' parameters for use.
        arrangement: Which layers every rank has.
        streams: Shapes of each group's stream.
        known: Microbatch -> arrays without gradient that scopes are made of.
        keeps_input: Whether a stage's input is all that is kept for its backward.
        skips: Whether an idle rank leaves its layers out (`idle`); else it computes
            them on zeros.
    """

    blocks: Sequence[Block]
    enters: Sequence[Enter | None]
    params: Sequence[Any]
    states: Sequence[Any]
    weights: Params
    arrangement: Arrangement
    streams: Sequence[Any]
    known: Callable[[jax.Array], Known]
    keeps_input: bool = False
    skips: bool = False

    @property
    def slots(self) -> tuple[int | None, ...]:
        """Of each group, the place of its stream in a payload; None if in none."""
        kinds: list[Any] = []
        slots: list[int | None] = []
        for group, stream in enumerate(self.streams):
            if group not in self.arrangement.crossing:
                slots.append(None)
                continue
            kind = (
                jax.tree.structure(stream),
                [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(stream)],
            )
            if kind not in kinds:
                kinds.append(kind)
            slots.append(kinds.index(kind))
        return tuple(slots)

    def payload(self, group: int, stream: Any, of: Any = None) -> Payload:
        """A payload with a group's stream in its place, zeros elsewhere.

        Args:
            group: Whose stream.
            stream: It.
            of: What stands for the streams of all groups; zeros when absent.
        """
        slots = self.slots
        found: list[Any] = [None] * (1 + max(at for at in slots if at is not None))
        for at, slot in enumerate(slots):
            if slot is not None and found[slot] is None:
                found[slot] = _zeros(self.streams[at]) if of is None else of[at]
        own = slots[group]
        if own is None:
            raise ValueError(f"the stream of group {group} never leaves a rank")
        found[own] = stream
        return tuple(found)

    def stream(self, group: int, payload: Payload) -> Stream:
        """A group's stream of a payload, zeros where it is in none."""
        slot = self.slots[group]
        return _zeros(self.streams[group]) if slot is None else payload[slot]

    def may_skip(self) -> bool:
        """Whether an idle rank may leave the layers out; where not, a warning says why.

        Nothing is run.
        """
        known, first = self.known(jnp.int32(0)), jnp.int32(0)
        for group, block in enumerate(self.blocks):
            stream = self.streams[group]
            found = layers_hindrance(self._stack(group, first), stream, known)
            if found is not None:
                tell(block.group.name, found)
                return False
        return True

    def run(self, at: At, payload: Payload) -> tuple[Payload, tuple]:
        """A microbatch through one of the stages, and the sums of its blocks."""
        known = self.known(at.microbatch)

        def through(group: int, x: Stream, y: Stream) -> tuple[Stream, Sums, None]:
            x, stack = self._entered(group, at.chunk, x, y, known)[0], self._stack
            if self.skips:
                num_layers = self._num_layers(group, at)
                of_stack = run_layers(stack(group, at.chunk), x, known, num_layers)
            else:
                of_stack = run_blocks(stack(group, at.chunk), x, known)
            return *of_stack, None

        return self._through(at.chunk, payload, through)[:2]

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
        found = _zeros(self.payload(0, self.streams[0], of=self.streams))
        of_ends: Any = ()
        of_next: Any = None
        for group in reversed(range(len(self.blocks))):
            entered, residuals = kept[group]
            dy = self._gradient_out(group, at.chunk, of_payload, of_next)
            dx, totals[group] = self._backward(
                group, at, residuals, dy, known, totals[group]
            )
            of_next, found, more = self._gradient_in(
                group, at.chunk, dx, found, entered, known
            )
            if more is not None:
                of_ends = more if not of_ends else jax.tree.map(jnp.add, of_ends, more)
        return found, totals, of_ends

    def _run_keeping(
        self, chunk: jax.Array, known: Known, payload: Payload
    ) -> tuple[Payload, tuple, Any]:
        checked = []

        def through(group: int, x: Stream, y: Stream) -> tuple[Stream, Sums, Any]:
            stack = self._stack(group, chunk)
            x, entered = self._entered(group, chunk, x, y, known)
            checked.append((stack, x))
            y, sums, residuals = run_keeping(stack, x, known)
            return y, sums, (entered, residuals)

        found = self._through(chunk, payload, through)
        check_names(checked, known)
        return found

    def _run_keeping_in(
        self, at: At, known: Known, payload: Payload, buffers: Any, slot: jax.Array
    ) -> tuple[Payload, tuple, Any]:
        """`_run_keeping`, each layer's residuals straight into the buffers."""
        written = []

        def through(group: int, x: Stream, y: Stream) -> tuple[Stream, Sums, None]:
            x, entered = self._entered(group, at.chunk, x, y, known)
            of_enter, of_layers = buffers[group]
            y, sums, of_layers = keep_layers(
                self._stack(group, at.chunk),
                x,
                known,
                self._num_layers(group, at),
                of_layers,
                jnp.maximum(slot, 0),
            )
            written.append([write(of_enter, slot, jax.tree.leaves(entered)), of_layers])
            return y, sums, None

        return *self._through(at.chunk, payload, through)[:2], written

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
        payload = self.payload(0, self.streams[0], of=self.streams)
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
        stack = self._stack(group, at.chunk)
        if self.skips:
            num_layers = self._num_layers(group, at)
            add = _adder(at.chunk)
            return backward_layers(stack, kept, dx, known, num_layers, totals, add)
        add = _adder(at.chunk, counts=at.at_work)
        return run_backward(stack, kept, dx, known, totals, add)

    def _through(
        self, chunk: jax.Array, payload: Payload, through: Callable[..., tuple]
    ) -> tuple[Payload, tuple, list]:
        """Every group in turn; the payload out, the sums, and what each kept."""
        out, y, auxiliary, statistics, kept = None, None, [], [], []
        for group, block in enumerate(self.blocks):
            y, sums, of_group = through(
                group, self.stream(group, payload), (payload, y)
            )
            names = block.group.auxiliary
            auxiliary.append({name: sums[name] for name in names})
            statistics.append({k: v for k, v in sums.items() if k not in names})
            kept.append(of_group)
            if self.slots[group] is not None:
                here = self._at(self.arrangement.ends(group), chunk)
                mine = self.payload(group, _where(here, y))
                out = mine if out is None else jax.tree.map(jnp.add, out, mine)
        return out, (auxiliary, statistics), kept

    def _entered(
        self, group: int, chunk: jax.Array, x: Stream, before: tuple, known: Known
    ) -> tuple[Stream, Residuals | None]:
        """A group's stream as its first layer here takes it; residuals of `enter`."""
        if group == 0:
            return x, None
        payload, y = before
        held = self._at(self.arrangement.holds(group - 1), chunk)
        previous = _where(held, y, self.stream(group - 1, payload))
        entered, residuals = previous, None
        enter = self.enters[group]
        if enter is not None:
            entered, residuals = vjp_without(
                lambda weights, y: enter(weights, y, known),
                (self.weights, previous),
                known=(self.weights, known),
            )
        begins = self._at(self.arrangement.begins(group), chunk)
        return _where(begins, entered, x), residuals

    def _gradient_out(
        self, group: int, chunk: jax.Array, of_payload: Payload, of_next: Any
    ) -> Stream:
        """Gradient of a group's last stream here."""
        ends = self._at(self.arrangement.ends(group), chunk)
        dy = _where(ends, self.stream(group, of_payload))
        if of_next is None:
            return dy
        return jax.tree.map(jnp.add, dy, of_next)

    def _gradient_in(
        self,
        group: int,
        chunk: jax.Array,
        dx: Stream,
        found: Payload,
        residuals: Residuals | None,
        known: Known,
    ) -> tuple[Any, Payload, Any]:
        """What a group's gradient becomes before it.

        Returns:
            Gradient of the stream of the group before here, of the payload with what
            this group adds, and of the ends' parameters or None.
        """
        if group == 0:
            return None, self._with(found, 0, dx), None
        begins = self._at(self.arrangement.begins(group), chunk)
        found = self._with(found, group, _where(_not(begins), dx))
        previous, more = _where(begins, dx), None
        if residuals is not None:
            vjp = restore_vjp(residuals, (self.weights, known))
            more, previous = _where(begins, vjp(previous))
        held = self._at(self.arrangement.holds(group - 1), chunk)
        found = self._with(found, group - 1, _where(_not(held), previous))
        return _where(held, previous), found, more

    def _with(self, payload: Payload, group: int, gradient: Stream) -> Payload:
        """A payload's gradient with that of a group's stream added."""
        slot = self.slots[group]
        if slot is None:
            return payload
        parts = list(payload)
        parts[slot] = jax.tree.map(jnp.add, parts[slot], gradient)
        return tuple(parts)

    def _stack(self, group: int, chunk: jax.Array) -> Stack:
        rank = lax.axis_index(STAGE)
        layers = _chunk(jnp.asarray(self.arrangement.layers[group])[rank], chunk)
        first = sum(block.group.num_layers for block in self.blocks[:group])
        return Stack(
            block=self.blocks[group],
            shards=jax.tree.map(lambda x: _chunk(x, chunk), self.params[group]),
            state=jax.tree.map(lambda x: _chunk(x, chunk), self.states[group]),
            layers=jnp.where(layers >= 0, layers + first, layers) if first else layers,
        )

    def _num_layers(self, group: int, at: At) -> jax.Array:
        """How many layers of a group the rank is to run."""
        found = np.count_nonzero(self.arrangement.layers[group] != NO_LAYER, axis=-1)
        here = jnp.asarray(found, jnp.int32)[lax.axis_index(STAGE)]
        return jnp.where(at.at_work, _chunk(here, at.chunk), 0)

    def _at(self, table: np.ndarray, chunk: jax.Array) -> bool | jax.Array:
        """A fact of this rank's stage; a plain boolean where all stages agree."""
        if table.all() or not table.any():
            return bool(table.all())
        return _chunk(jnp.asarray(table)[lax.axis_index(STAGE)], chunk)


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


def _where(condition: bool | jax.Array, tree: Any, other: Any = None) -> Any:
    """`where`, nothing done where the condition is known."""
    if condition is True:
        return tree
    if condition is False:
        return _zeros(tree) if other is None else other
    return where(condition, tree, other)


def _not(condition: bool | jax.Array) -> bool | jax.Array:
    return not condition if isinstance(condition, bool) else ~condition


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)


def _chunk(value: jax.Array, chunk: jax.Array) -> jax.Array:
    if value.shape[0] == 1:
        return value[0]
    return part(value, chunk)
