"""One executor for every schedule: all ranks in lock step, tick by tick.

Each tick runs the forward of one microbatch and the backward of another with `jax.vjp`,
and hops gradients down beside the one, activations up beside the other. The backward is
not the derivative of the loop, so nothing is kept but what the schedule has in flight,
however many microbatches there are. Ranks without work leave it out (`idle`), or
compute on zeros and the result is dropped.
Reference: Narayanan et al. 2021 (PipeDream-flush, interleaved 1F1B).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.parallel.blocks import where
from meshpar.parallel.pipeline.buffers import read, write
from meshpar.parallel.pipeline.ends import STAGE
from meshpar.parallel.pipeline.hops import Hops, after
from meshpar.parallel.pipeline.payloads import zeros_of
from meshpar.parallel.pipeline.work import At, Payload, Results, Work
from meshpar.schedules import Phase, Schedule, TickTable, tick_table
from meshpar.schedules.tick_table import ARRAYS

IDLE = 0.0
"""What ranks compute on while they have no microbatch. Nothing of it is kept; zeros,
because `jnp.where` masks a NaN forward, not its gradient."""

_NOT_READ = {"backward_op"}
"""Of a tick table's arrays: here every backward is a whole one."""

_ROWS = tuple(name for name in ARRAYS if name not in _NOT_READ)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """What one tick hands to the next."""

    inputs: Payload
    gradients: Payload
    downward: Payload
    saved: Any
    found: Results


@dataclass(frozen=True, kw_only=True)
class Executor:
    """Runs a schedule in lock step.

    Args:
        schedule: What every rank does.
        work: What to run.
    """

    schedule: Schedule
    work: Work

    @cached_property
    def table(self) -> TickTable:
        """The schedule, tick by tick."""
        return tick_table(self.schedule)

    def loss_and_gradients(self) -> Results:
        """Loss sums and gradients: the forwards and backwards of every tick."""
        state = self._first_state()
        for phase in self.table.phases:
            state = self._run(state, phase)
        return state.found

    def loss_sums(self) -> Any:
        """Loss sums alone: the forwards of every tick."""
        stop = max(phase.stop for phase in self.table.phases if phase.has_forward)
        phase = Phase(True, False, 0, stop)
        state = self._run(self._first_state(keeps=False), phase, keeps=False)
        return state.found.loss_sums

    def _run(self, state: _State, phase: Phase, *, keeps: bool = True) -> _State:
        rows = self._rows(phase.start, phase.stop)
        # No microbatch ends while the pipeline fills: no head is computed there. No
        # gradient arrives in a phase that has but the first backward.
        has_head, receives = (
            bool((rows[name] >= 0).any()) for name in ("ended", "gradient_write")
        )

        def tick(state: _State, row: Any) -> tuple[_State, None]:
            return self._tick(state, row, phase, has_head, receives, keeps), None

        return lax.scan(tick, state, rows)[0]

    def _first_state(self, *, keeps: bool = True) -> _State:
        def buffer(slots: tuple[int, ...], shape: Any) -> jax.Array:
            return jnp.zeros((max(max(slots), 1), *shape.shape), shape.dtype)

        def buffers(slots: tuple[int, ...]) -> Payload:
            zeros = jax.tree.map(lambda shape: buffer(slots, shape), work.payload)
            return self._hops.laid_out(zeros)

        work, table = self.work, self.table
        return _State(
            inputs=buffers(table.input_slots),
            gradients=buffers(table.gradient_slots),
            downward=self._hops.laid_out(zeros_of(work.payload)) if keeps else (),
            saved=jax.tree.map(
                lambda shape: buffer(table.saved_slots, shape),
                work.kept if keeps else (),
            ),
            found=Results(
                block_gradients=zeros_of(work.gradients if keeps else ()),
                end_gradients=zeros_of(work.end_gradients if keeps else ()),
                input_gradients=zeros_of(work.inputs if keeps else ()),
                loss_sums=zeros_of(work.loss_sums),
                auxiliary=zeros_of(work.auxiliary),
                statistics=zeros_of(work.statistics),
            ),
        )

    def _rows(self, start: int, stop: int) -> dict[str, Any]:
        """The ticks' rows, and the microbatch at either end of the pipeline."""
        table = self.table
        rows = {name: getattr(table, name)[start:stop] for name in _ROWS}
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
        return rows

    def _tick(
        self,
        state: _State,
        row: dict[str, jax.Array],
        phase: Phase,
        has_head: bool,
        receives: bool,
        keeps: bool,
    ) -> _State:
        """One tick; hops leave where a stage's matmuls lie between start and done.

        Gradients of the tick before travel beside the forward, activations beside the
        backward, and the ends' collectives stand in between: XLA:GPU has one collective
        in flight at a time.
        """
        own = self._own_row(row)
        x = dy = down = up = None
        if phase.has_forward:
            x = self._stage_input(state, row, own)
        if phase.has_backward and receives:
            down = self._hops.sent(
                state.downward, x, self.table.gradient_hops, "stage_backward"
            )
            state = self._received(state, "gradients", own["gradient_write"], down)
        if phase.has_forward:
            state, y = self._forward(state, own, x, keeps)
            if has_head:
                state, dy = self._head(state, row, own, after(y, down), keeps)
            up = self._hops.sent(y, dy, self.table.input_hops, "stage_forward")
            state = self._received(state, "inputs", own["input_write"], up)
        if phase.has_backward:
            state = self._backward(state, row, own, up)
        return state

    @cached_property
    def _hops(self) -> Hops:
        return Hops(num_ranks=self.schedule.num_ranks, specs=self.work.specs)

    def _own_row(self, row: dict[str, jax.Array]) -> dict[str, jax.Array]:
        rank = lax.axis_index(STAGE)
        return {name: jnp.asarray(row[name])[rank] for name in _ROWS}

    def _forward(
        self, state: _State, own: dict, x: Payload, keeps: bool
    ) -> tuple[_State, Payload]:
        work, at = self.work, _at_work(own, "forward")
        found, saved = state.found, state.saved
        if keeps:
            y, sums, saved = work.stage_keeping(at, x, saved, own["saved_write"])
        else:
            y, sums = work.stage(at, x)
        auxiliary, statistics = sums
        found = replace(
            found,
            auxiliary=_add(found.auxiliary, auxiliary, at.at_work),
            statistics=_add_at(found.statistics, at.chunk, statistics, at.at_work),
        )
        return replace(state, saved=saved, found=found), y

    def _head(
        self, state: _State, row: dict, own: dict, y: Payload, keeps: bool
    ) -> tuple[_State, Payload]:
        """The head of the microbatch that ends, and the gradient that it sends back."""
        is_last = own["forward_stage"] == self.schedule.num_stages - 1
        at_end, some = is_last & (own["forward_microbatch"] >= 0), row["ended"] >= 0
        sums, dy, gradients = self.work.head(
            jnp.maximum(row["ended"], 0), where(at_end, y)
        )
        found = replace(state.found, loss_sums=_add(state.found.loss_sums, sums, some))
        if not keeps:
            return replace(state, found=found), dy
        ends = _add(found.end_gradients, gradients, some)
        written = write(state.gradients, own["loss_write"], dy)
        found = replace(found, end_gradients=ends)
        gradients = self._hops.laid_out(written)
        return replace(state, found=found, gradients=gradients), dy

    def _stage_input(self, state: _State, row: dict, own: dict) -> Payload:
        """What this rank's stage takes: embedded, arrived, or zeros."""
        embedded = self.work.embed(jnp.maximum(row["embedded"], 0))
        arrived = read(state.inputs, own["input_read"])
        x = where(own["forward_stage"] == 0, embedded, arrived)
        return self._hops.laid_out(_or_idle(own["forward_microbatch"] >= 0, x))

    def _backward(self, state: _State, row: dict, own: dict, up: Any) -> _State:
        work, at, found = self.work, _at_work(own, "backward"), state.found
        dy = _or_idle(at.at_work, read(state.gradients, own["gradient_read"]))
        dx, block_gradients, of_ends = work.stage_gradient(
            at,
            state.saved,
            own["saved_read"],
            self._hops.laid_out(dy),
            found.block_gradients,
        )
        at_start = (own["backward_stage"] == 0) & at.at_work
        embedded = row["embedded_back"]
        end_gradients, input_gradients = work.embed_gradient(
            jnp.maximum(embedded, 0), after(where(at_start, dx), up)
        )
        total = _add(found.end_gradients, end_gradients, embedded >= 0)
        found = replace(
            found,
            block_gradients=block_gradients,
            end_gradients=_add(total, of_ends, at.at_work) if of_ends else total,
            input_gradients=write(found.input_gradients, embedded, input_gradients),
        )
        return replace(state, downward=dx, found=found)

    def _received(
        self, state: _State, name: str, slots: jax.Array, arrived: list[Payload]
    ) -> _State:
        """The state with what arrived in a slot of the buffers of that name."""
        buffers = getattr(state, name)
        for slot, payload in zip(slots, arrived, strict=True):
            buffers = write(buffers, slot, payload)
        return replace(state, **{name: self._hops.laid_out(buffers)})


def _or_idle(at_work: jax.Array, payload: Payload) -> Payload:
    return jax.tree.map(lambda x: jnp.where(at_work, x, IDLE), payload)


def _at_work(own: dict[str, jax.Array], which: str) -> At:
    chunk, microbatch = own[f"{which}_chunk"], own[f"{which}_microbatch"]
    return At(jnp.maximum(chunk, 0), jnp.maximum(microbatch, 0), microbatch >= 0)


def _add(total: Any, more: Any, counts: jax.Array) -> Any:
    """Adds where it counts; what does not may be NaN."""
    return jax.tree.map(
        lambda one, other: one + jnp.where(counts, other.astype(one.dtype), 0),
        total,
        more,
    )


def _add_at(total: Any, chunk: jax.Array, more: Any, counts: jax.Array) -> Any:
    """`_add` to the part of one chunk."""
    return jax.tree.map(
        lambda one, other: one.at[chunk].add(
            jnp.where(counts, other.astype(one.dtype), 0)
        ),
        total,
        more,
    )
