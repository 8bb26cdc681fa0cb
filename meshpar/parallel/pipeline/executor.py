"""One executor for every schedule: all ranks move tick by tick.

In lock step a tick runs the forward of one microbatch and the backward of another with
`jax.vjp`, and hops gradients down beside the one, activations up beside the other; or
both run layer by layer side by side (`paired_stages`). If ranks diverge, each does one
action of its own in a tick; hops and ends are outside of them. Backwards may be split
(`split_stages`). The backward is not the derivative of the loop, so only what the
schedule has in flight is kept, however many microbatches there are. Ranks without work
skip it (`rank_layers`), or compute on zeros and the result is dropped.
Reference: Narayanan et al. 2021 (PipeDream-flush, interleaved 1F1B).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.parallel.blocks import where
from meshpar.parallel.pipeline.crossing import (
    STAGE,
    Hops,
    Payload,
    after,
    read,
    write,
)
from meshpar.parallel.pipeline.uneven_shard import UnevenShard
from meshpar.parallel.pipeline.work import (
    At,
    Learning,
    Results,
    TickState,
    Work,
    add_counted,
    first_state,
    with_forward,
)
from meshpar.rules.rules import auto_mesh_shape
from meshpar.schedules import Phase, Schedule, TickTable, tick_table
from meshpar.schedules.tick_table import ARRAYS

IDLE = 0.0
"""Input of ranks without a microbatch. Nothing of it is kept; zeros, because
`jnp.where` masks a NaN forward, not its gradient."""


@dataclass(frozen=True)
class Executor:
    """Run a schedule.

    Args:
        schedule: The order of every rank's work.
        work: The functions to run.
        divergent: True if each rank does an action of its own in a tick; False for lock
            step.
        first: Arrays that are computed before the first tick.
        ordered_by_data: True if nothing but data orders collectives and loops
            (`once_known`).
        shard: Number of ticks of this device, if devices differ in it; with one rank a
            tick is a microbatch.
        learning: Weights that change from tick to tick, where ranks diverge; None if
            `work` holds those of all ticks.
    """

    schedule: Schedule
    work: Work
    divergent: bool = False
    first: Sequence[jax.Array] = ()
    ordered_by_data: bool = False
    shard: UnevenShard | None = None
    learning: Learning | None = None

    @cached_property
    def table(self) -> TickTable:
        """The schedule, tick by tick."""
        paired = self.work.pair is not None
        return tick_table(self.schedule, divergent=self.divergent, paired=paired)

    def loss_and_gradients(self) -> Results:
        """Run the forwards and backwards of all ticks: loss sums and gradients."""
        return self.last_state().results

    def last_state(self) -> TickState:
        """Run the forwards and backwards of all ticks: the state after the last."""
        state = self._first_state()
        for phase, chunks in self._parts():
            state = self._run(state, phase, chunks)
        return state

    def loss_sums(self) -> Any:
        """Run the forwards of all ticks: loss sums."""
        stop = max(phase.stop for phase in self.table.phases if phase.has_forward)
        phase = Phase(True, False, 0, stop)
        state = self._run(self._first_state(keeps=False), phase, keeps=False)
        return state.results.loss_sums

    def _parts(self) -> Iterator[tuple[Phase, tuple[int, ...]]]:
        """Yield the phases in order, and the chunks whose last backward is in each.

        If the last backward reduces, a tick with one is a phase of its own: a chunk's
        gradients are complete when the last of the ranks has run its last microbatch.
        """
        last = self._completed
        for phase in self.table.phases:
            start = phase.start
            for tick in sorted(set(last) & set(range(phase.start, phase.stop))):
                if tick > start:
                    yield phase._replace(start=start, stop=tick), ()
                yield phase._replace(start=tick, stop=tick + 1), last[tick]
                start = tick + 1
            if phase.stop > start:
                yield phase._replace(start=start), ()

    @cached_property
    def _completed(self) -> dict[int, tuple[int, ...]]:
        """The chunks whose last backward is in a tick, by tick; empty if none counts.

        By the first of these ticks the head's gradients are complete too.
        """
        found: dict[int, tuple[int, ...]] = {}
        reduces = self.work.last_gradient is not None
        for chunk in range(self.schedule.num_chunks if reduces else 0):
            ticks = (self.table.backward_chunk == chunk).any(axis=1)
            tick = int(np.flatnonzero(ticks)[-1])
            found[tick] = (*found.get(tick, ()), chunk)
        return found

    def _run(
        self,
        state: TickState,
        phase: Phase,
        chunks: tuple[int, ...] = (),
        *,
        keeps: bool = True,
    ) -> TickState:
        rows: dict[str, Any] = self._rows(phase.start, phase.stop)
        # No microbatch ends while the pipeline fills: no head is computed there. No
        # gradient arrives in a phase that has but the first backward.
        has = {
            name: bool((rows[name] >= 0).any())
            for name in ("ended", "input_write", "gradient_write")
        }

        # JAX and XLA unroll a loop of one tick, whose end orders nothing then.
        results = state.results
        before: Any = self.first
        if phase.start > 0:
            before = (
                (state.gradients, state.downward, state.stash),
                (results.block_gradients, results.end_gradients),
                results.input_gradients,
            )
        state = replace(state, downward=self.once_known(state.downward, before))
        never = self._never(before)

        def tick(state: TickState, row: Any) -> tuple[TickState, None]:
            row = _plus(row, never)
            if self.learning is not None and keeps:
                work = self.learning.work(state.weights, row)
                state = replace(self, work=work)._own_tick(
                    state, row, phase, has, keeps
                )
                return self.learning.learned(state, row, self.once_known), None
            if self.divergent:
                return self._own_tick(state, row, phase, has, keeps), None
            return self._tick(state, row, phase, chunks, has, keeps), None

        if chunks:
            # No loop, as what is reduced has another shape. The barrier keeps the
            # forward of the last microbatch from running before all others.
            row = {name: jnp.asarray(row[0]) for name, row in rows.items()}
            return tick(state, after(row, state.results.loss_sums))[0]
        if self.shard is not None:
            return self.shard.scan(tick, state, rows)
        return lax.scan(tick, state, rows)[0]

    def _first_state(self, *, keeps: bool = True) -> TickState:
        state = first_state(
            self.work, self.table, self._hops, divergent=self.divergent, keeps=keeps
        )
        if self.learning is None or not keeps:
            return state
        return replace(state, weights=self.learning.first())

    def _rows(self, start: int, stop: int) -> dict[str, Any]:
        """Return the ticks' rows, and the microbatch at either end of the pipeline."""
        table = self.table
        rows = {name: getattr(table, name)[start:stop] for name in ARRAYS}
        at_first = table.forward_stage == 0
        at_last = table.forward_stage == self.schedule.num_stages - 1
        back_at_first = table.backward_stage == 0
        for name, here, microbatch in (
            ("embedded", at_first, table.forward_microbatch),
            ("ended", at_last, table.forward_microbatch),
            ("embedded_back", back_at_first, table.backward_microbatch),
        ):
            rows[name] = np.where(here, microbatch, -1).max(axis=1)[start:stop]
        rows["gradient_write"] = table.gradient_arrival[start:stop]
        if self.divergent:
            for name in ("input_write", "gradient_write"):
                rows[name] = _one_later(getattr(table, name))[start:stop]
        if self.learning is not None:
            rows.update(self.learning.rows(start, stop))
        return rows

    def _tick(
        self,
        state: TickState,
        row: dict[str, jax.Array],
        phase: Phase,
        chunks: tuple[int, ...],
        has: dict[str, bool],
        keeps: bool,
    ) -> TickState:
        """Run one tick of lock step, in an order that leaves matmuls beside the hops.

        Gradients of the tick before travel beside the forward, activations beside the
        backward, and the ends' collectives stand in between: XLA:GPU has one collective
        in flight at a time.
        """
        rank = lax.axis_index(STAGE)
        own = {name: jnp.asarray(row[name])[rank] for name in ARRAYS}
        x = dy = down = up = dx = more_ends = None
        pairs = self.work.pair and phase.has_forward and phase.has_backward
        if phase.has_forward:
            x = self._input(state, row, own)
        if phase.has_backward and has["gradient_write"]:
            down = self._hops.sent(
                state.downward, x, self.table.gradient_hops, "stage_backward"
            )
            state = self._received(state, "gradients", own["gradient_write"], down)
            own = self.once_known(own, down)
        if phase.has_forward:
            if pairs and not chunks:
                state, y, dx, more_ends = self._pair(state, own, x)
            else:
                state, y = self._forward(state, own, x, keeps)
            if has["ended"]:
                state, dy = self._head(state, row, own, after(y, down), keeps)
            up = self._hops.sent(y, dy, self.table.input_hops, "stage_forward")
            state = self._received(state, "inputs", own["input_write"], up)
            own = self.once_known(own, dy, up)
        if phase.has_backward:
            if dx is None:
                state, dx, more_ends = self._stage_gradient(state, own, chunks)
            state = self._embed_gradient(state, row, own, dx, up, more_ends)
        if phase.has_weight_grad:
            ends = state.results.end_gradients, state.results.input_gradients
            state = self._weight_gradient(state, own, (state.downward, ends))
        return state

    def once_known(self, tree: Any, *known: Any) -> Any:
        """Return a tree of arrays that are known only once all of `known` are.

        XLA:CPU orders a collective and a loop by data alone, and barriers are gone when
        it does. A sum over devices beside a loop ran before that loop's permutes on one
        device and after them on another, so both waited forever. No number is below
        minus infinity, which XLA does not simplify.
        """
        return _plus(tree, self._never(known))

    def _never(self, known: Any) -> jax.Array | None:
        """Return False, once arrays are known; None if there is no need to wait.

        GSPMD would communicate for a value of an array that it splits.
        """
        whole = max(auto_mesh_shape().values(), default=1) == 1
        values = [
            jnp.real(leaf).ravel()[0]
            for leaf in jax.tree.leaves(known)
            if leaf.ndim == 0 or whole
        ]
        if not (self.ordered_by_data and values):
            return None
        return jnp.any(jnp.stack([value < -jnp.inf for value in values]))

    def _own_tick(
        self,
        state: TickState,
        row: dict[str, jax.Array],
        phase: Phase,
        has: dict[str, bool],
        keeps: bool,
    ) -> TickState:
        """Run one tick in which each rank does one action of its own.

        What all ranks do together comes before and after the actions: the hops of what
        the tick before computed, and the ends. Each waits for the one before, so that
        no two devices meet two collectives in different orders.
        """
        rank, table = lax.axis_index(STAGE), self.table
        own = {name: jnp.asarray(row[name])[rank] for name in ARRAYS}
        arrived: Any = None
        for name, sent, hops in (
            ("inputs", state.upward, table.input_hops),
            ("gradients", state.downward, table.gradient_hops),
        ):
            slots = f"{name[:-1]}_write"
            if has[slots] and (keeps or name == "inputs"):
                arrived = self._hops.sent(sent, arrived, hops, _HOP_REASONS[name])
                state = self._received(state, name, own[slots], arrived)
        y = dx = more_ends = None
        done: list[Any] = [arrived]
        if phase.has_forward:
            row = {**row, "embedded": after(row["embedded"], arrived)}
            state, y = self._forward(state, own, self._input(state, row, own), keeps)
            done.append(_one_value(y))
        if phase.has_backward:
            state, dx, more_ends = self._stage_gradient(state, own)
            done.append(_one_value(dx))
        if phase.has_weight_grad:
            state = self._weight_gradient(state, own, arrived)
            done.append(_one_value(state.results.block_gradients))
        if y is not None:
            if has["ended"]:
                whole = self.once_known(after(y, done), done)
                state, dy = self._head(state, row, own, whole, keeps)
                done.append(_one_value(dy))
            state = replace(state, upward=y)
        if dx is not None:
            dx = self.once_known(dx, done)
            state = self._embed_gradient(state, row, own, dx, done, more_ends)
        return state

    def _input(self, state: TickState, row: dict, own: dict) -> Payload:
        """Return what this rank's forward takes: an embedding, or what arrived."""
        embedded = self.work.embed(jnp.maximum(row["embedded"], 0))
        arrived = read(state.inputs, own["input_read"])
        x = where(own["forward_stage"] == 0, embedded, arrived)
        return self._hops.laid_out(_or_idle(own["forward_microbatch"] >= 0, x))

    @cached_property
    def _hops(self) -> Hops:
        return Hops(num_ranks=self.schedule.num_ranks, specs=self.work.specs)

    def _forward(
        self, state: TickState, own: dict, x: Payload, keeps: bool
    ) -> tuple[TickState, Payload]:
        at = _action(own, "forward")
        if not keeps:
            y, sums = self.work.stage(at, x)
            return with_forward(state, at, sums, state.saved), y
        given = at, x, state.saved, own["saved_write"]
        y, *made = self.work.stage_keeping(*given)
        return with_forward(state, at, *made), y

    def _pair(
        self, state: TickState, own: dict, x: Payload
    ) -> tuple[TickState, Payload, Payload, Any]:
        """Run `_forward` and `_stage_gradient` side by side."""
        work, at = self.work, _action(own, "forward")
        assert work.pair is not None
        forward, backward = work.pair(
            (at, x, state.saved, own["saved_write"]),
            self._backward_given(state, own),
            self.once_known,
        )
        y, *made = forward
        dx, total, more_ends = backward
        state = with_forward(state, at, *made)
        return self._with_backward(state, total), y, dx, more_ends

    def _head(
        self, state: TickState, row: dict, own: dict, y: Payload, keeps: bool
    ) -> tuple[TickState, Payload]:
        """Run the head of the microbatch that ends; return its gradient too."""
        is_last = own["forward_stage"] == self.schedule.num_stages - 1
        at_end, some = is_last & (own["forward_microbatch"] >= 0), row["ended"] >= 0
        sums, dy, gradients = self.work.head(
            jnp.maximum(row["ended"], 0), where(at_end, y)
        )
        results = replace(
            state.results, loss_sums=add_counted(state.results.loss_sums, sums, some)
        )
        if not keeps:
            return replace(state, results=results), dy
        ends = add_counted(results.end_gradients, gradients, some)
        written = write(state.gradients, own["loss_write"], dy)
        results = replace(results, end_gradients=ends)
        gradients = self._hops.laid_out(written)
        return replace(state, results=results, gradients=gradients), dy

    def _stage_gradient(
        self, state: TickState, own: dict, chunks: tuple[int, ...] = ()
    ) -> tuple[TickState, Payload, Any]:
        """Run this rank's backward, whole or for the input.

        Args:
            state: The state.
            own: The rank's row of the tick table.
            chunks: Those whose gradients are complete, and reduced, with this backward.

        Returns:
            The state, the gradient of the stage's input, and gradients of the ends.
        """
        work = self.work
        if chunks:
            # Here ticks are no iterations of a loop, and the head's logits would stay
            # until its gradient is reduced.
            kept = state.results, state.gradients, state.saved
            results, gradients, saved = lax.optimization_barrier(kept)
            state = replace(state, results=results, gradients=gradients, saved=saved)
        given = self._backward_given(state, own)
        if chunks and work.last_gradient and work.reduce_ends:
            ends = state.results.end_gradients
            if chunks == self._completed[min(self._completed)]:
                ends = work.reduce_ends(ends)
            dx, total, more_ends, ends = work.last_gradient(
                *given, chunks=chunks, overlapped=ends
            )
            results = replace(state.results, end_gradients=ends)
            state = replace(state, results=results)
        else:
            split = work.split
            gradient = split.input_gradient if split else work.stage_gradient
            dx, total, more_ends = gradient(*given)
        return self._with_backward(state, total), dx, more_ends

    def _backward_given(self, state: TickState, own: dict) -> tuple[Any, ...]:
        """Return what the rank's backward takes, whole or for the input."""
        at = _action(own, "backward")
        dy = _or_idle(at.is_active, read(state.gradients, own["gradient_read"]))
        given = at, state.saved, own["saved_read"], self._hops.laid_out(dy)
        if self.work.split is not None:
            return *given, state.stash, own["stash_write"]
        return *given, state.results.block_gradients

    def _with_backward(self, state: TickState, total: Any) -> TickState:
        """Return the state with what a backward adds to."""
        if self.work.split is not None:
            return replace(state, stash=total)
        return replace(state, results=replace(state.results, block_gradients=total))

    def _weight_gradient(self, state: TickState, own: dict, before: Any) -> TickState:
        """Run this rank's weight gradient, once `before` is there.

        Its collectives then follow those of the tick on every device.
        """
        assert self.work.split is not None
        own = self.once_known(own, before)
        results = state.results
        total = self.work.split.weight_gradient(
            _action(own, "weight_grad"),
            state.stash,
            own["stash_read"],
            results.block_gradients,
        )
        return replace(state, results=replace(results, block_gradients=total))

    def _embed_gradient(
        self,
        state: TickState,
        row: dict,
        own: dict,
        dx: Payload,
        before: Any,
        more_ends: Any,
    ) -> TickState:
        """Add up gradients of ends and inputs, once `before` is there; send `dx` on."""
        at, results = _action(own, "backward"), state.results
        at_start = (own["backward_stage"] == 0) & at.is_active
        embedded = row["embedded_back"]
        end_gradients, input_gradients = self.work.embed_gradient(
            jnp.maximum(embedded, 0), after(where(at_start, dx), before)
        )
        total = add_counted(results.end_gradients, end_gradients, embedded >= 0)
        if more_ends:
            total = add_counted(total, more_ends, at.is_active)
        results = replace(
            results,
            end_gradients=total,
            input_gradients=write(results.input_gradients, embedded, input_gradients),
        )
        return replace(state, downward=dx, results=results)

    def _received(
        self, state: TickState, name: str, slots: jax.Array, arrived: list[Payload]
    ) -> TickState:
        """Return the state with the arrived payloads in slots of the named buffers."""
        buffers = getattr(state, name)
        for slot, payload in zip(slots, arrived, strict=True):
            buffers = write(buffers, slot, payload)
        return replace(state, **{name: self._hops.laid_out(buffers)})


_HOP_REASONS = {"inputs": "stage_forward", "gradients": "stage_backward"}
"""Why a tick's hops are made, by the buffers that they fill."""


def _one_later(slots: np.ndarray) -> np.ndarray:
    """Return what every tick writes in the tick after it."""
    later = np.full_like(slots, -1)
    later[1:] = slots[:-1]
    return later


def _plus(tree: Any, never: jax.Array | None) -> Any:
    """Add a boolean that is never true to every array of a tree."""
    if never is None:
        return tree
    return jax.tree.map(lambda x: x + never.astype(x.dtype), tree)


def _one_value(tree: Any) -> jax.Array:
    """Return one value of a tree, to wait for it."""
    return jax.tree.leaves(tree)[0].ravel()[0]


def _or_idle(is_active: jax.Array, payload: Payload) -> Payload:
    return jax.tree.map(lambda x: jnp.where(is_active, x, IDLE), payload)


def _action(own: dict[str, jax.Array], which: str) -> At:
    chunk, microbatch = own[f"{which}_chunk"], own[f"{which}_microbatch"]
    return At(jnp.maximum(chunk, 0), jnp.maximum(microbatch, 0), microbatch >= 0)
