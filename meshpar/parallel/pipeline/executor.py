"""One executor for every schedule: all ranks in lock step, tick by tick.

Each tick runs the forward of one microbatch and the backward of another with `jax.vjp`,
then hops activations up and gradients down. The backward is not the derivative of the
loop, so nothing is kept but what the schedule has in flight, however many microbatches
there are. Ranks without work compute on zeros and the result is dropped.
Reference: Narayanan et al. 2021 (PipeDream-flush, interleaved 1F1B).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.collectives import Zero, asked, follow, on_parts, zero_on_parts
from meshpar.parallel.pipeline.ends import STAGE
from meshpar.parallel.pipeline.stages import part
from meshpar.parallel.pipeline.work import Results, Work
from meshpar.rules.rules import spec_axes
from meshpar.schedules import Phase, TickTable

IDLE = 0.0
"""What ranks compute on while they have no microbatch. Nothing of it is kept; zeros,
because `jnp.where` masks a NaN forward, not its gradient."""

_ROWS = (
    "forward_chunk",
    "forward_microbatch",
    "forward_stage",
    "backward_chunk",
    "backward_microbatch",
    "backward_stage",
    "saved_write",
    "saved_read",
    "input_read",
    "input_write",
    "loss_write",
    "gradient_read",
    "gradient_write",
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """What one tick hands to the next."""

    inputs: jax.Array
    gradients: jax.Array
    saved: list[jax.Array]
    block_gradients: Any
    end_gradients: Any
    input_gradients: Any
    loss_sums: Any
    auxiliary: dict[str, jax.Array]
    done: jax.Array


@dataclass(frozen=True, kw_only=True)
class Executor:
    """Runs a tick table.

    Args:
        table: The schedule in lock step.
        num_stages: Stages of all ranks.
        work: What to run.
        in_order: Whether collectives wait for one another (`meshpar.collectives`).
    """

    table: TickTable
    num_stages: int
    work: Work
    in_order: bool = False

    def loss_and_gradients(self) -> Results:
        """Loss sums and gradients: the forwards and backwards of every tick."""
        state = self._first_state()
        for phase in self.table.phases:
            state = lax.scan(
                lambda state, row, at=phase: (self._tick(state, row, at), None),
                state,
                self._rows(phase.start, phase.stop),
            )[0]
        return Results(
            loss_sums=self._after_the_loop(state),
            auxiliary=state.auxiliary,
            block_gradients=state.block_gradients,
            end_gradients=state.end_gradients,
            input_gradients=state.input_gradients,
        )

    def loss_sums(self) -> Any:
        """Loss sums alone: the forwards of every tick."""
        stop = max(phase.stop for phase in self.table.phases if phase.has_forward)
        phase = Phase(True, False, 0, stop)
        state = self._first_state(keeps=False)
        state = lax.scan(
            lambda state, row: (self._tick(state, row, phase, keeps=False), None),
            state,
            self._rows(0, stop),
        )[0]
        return self._after_the_loop(state)

    def _after_the_loop(self, state: _State) -> Any:
        """The loss sums, no sooner than the last collective of the last tick."""
        # XLA unrolls a phase of one tick: then the sums are there before its end.
        done = state.done if self.in_order else None
        return jax.tree.map(lambda value: follow(value, done), state.loss_sums)

    def _first_state(self, *, keeps: bool = True) -> _State:
        def buffer(slots: tuple[int, ...], shape: Any) -> jax.Array:
            return jnp.zeros((max(max(slots), 1), *shape.shape), shape.dtype)

        work, table = self.work, self.table
        x, dtype = work.x, work.gradient_dtype
        kept = jax.tree.leaves(self._kept()) if keeps else []
        return _State(
            inputs=self._laid_out(buffer(table.input_slots, x)),
            gradients=self._laid_out(buffer(table.gradient_slots, x)),
            saved=[buffer(table.saved_slots, leaf) for leaf in kept],
            block_gradients=_zeros(work.gradients if keeps else (), dtype),
            end_gradients=_zeros(work.end_gradients if keeps else (), dtype),
            input_gradients=jax.tree.map(jnp.zeros_like, work.inputs if keeps else ()),
            loss_sums=_zeros(work.loss_sums, jnp.float32),
            auxiliary={name: jnp.zeros(()) for name in work.auxiliary},
            done=jnp.zeros(()),
        )

    def _rows(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """The ticks' rows, and the microbatch at either end of the pipeline."""
        table = self.table
        rows = {name: getattr(table, name)[start:stop] for name in _ROWS}
        at_first = table.forward_stage == 0
        at_last = table.forward_stage == self.num_stages - 1
        back_at_first = table.backward_stage == 0
        for name, here, microbatch in (
            ("embedded", at_first, table.forward_microbatch),
            ("ended", at_last, table.forward_microbatch),
            ("embedded_back", back_at_first, table.backward_microbatch),
        ):
            rows[name] = np.where(here, microbatch, -1).max(axis=1)[start:stop]
        return rows

    def _tick(
        self, state: _State, row: dict[str, jax.Array], phase: Phase, keeps: bool = True
    ) -> _State:
        own = self._own_row(row)
        up = down = None
        if phase.has_forward:
            state, up = self._forward(state, row, own, keeps)
        if phase.has_backward:
            state, down = self._backward(state, row, own, up)
        return self._hop(state, own, up, down)

    def _own_row(self, row: dict[str, jax.Array]) -> dict[str, jax.Array]:
        rank = lax.axis_index(STAGE)
        return {name: jnp.asarray(row[name])[rank] for name in _ROWS}

    def _forward(
        self, state: _State, row: dict, own: dict, keeps: bool
    ) -> tuple[_State, jax.Array]:
        work, microbatch = self.work, own["forward_microbatch"]
        x = self._stage_input(state, row, own)
        y, auxiliary, saved = self._through_stage(state, own, x, keeps)
        at_end = (own["forward_stage"] == self.num_stages - 1) & (microbatch >= 0)
        last = jnp.where(at_end, y, 0)
        sums, dy, gradients, done = work.head(jnp.maximum(row["ended"], 0), last)
        some = row["ended"] >= 0
        state = dataclasses.replace(
            state,
            saved=saved,
            loss_sums=_add(state.loss_sums, sums, some),
            auxiliary=_add(state.auxiliary, auxiliary, microbatch >= 0),
            done=done if self.in_order else state.done,
        )
        if keeps:
            state = dataclasses.replace(
                state,
                end_gradients=_add(state.end_gradients, gradients, some),
                gradients=self._laid_out(
                    _write(state.gradients, own["loss_write"], dy)
                ),
            )
        return state, y

    def _stage_input(self, state: _State, row: dict, own: dict) -> jax.Array:
        """What this rank's stage takes: embedded, arrived, or `IDLE`."""
        done = state.done if self.in_order else None
        embedded = self.work.embed(jnp.maximum(row["embedded"], 0), done)
        arrived = _at(state.inputs, own["input_read"])
        x = jnp.where(own["forward_stage"] == 0, embedded, arrived)
        return self._laid_out(jnp.where(own["forward_microbatch"] >= 0, x, IDLE))

    def _through_stage(
        self, state: _State, own: dict, x: jax.Array, keeps: bool
    ) -> tuple[jax.Array, Any, list[jax.Array]]:
        """The stage's output, its auxiliary losses, and the buffers of what is kept."""
        chunk = jnp.maximum(own["forward_chunk"], 0)
        microbatch = jnp.maximum(own["forward_microbatch"], 0)
        if not keeps:
            return *self.work.stage(chunk, microbatch, x), state.saved
        y, auxiliary, kept = self.work.stage_keeping(chunk, microbatch, x)
        pairs = zip(state.saved, jax.tree.leaves(kept), strict=True)
        slot = own["saved_write"]
        return y, auxiliary, [_write(buffer, slot, value) for buffer, value in pairs]

    def _backward(
        self, state: _State, row: dict, own: dict, up: jax.Array | None
    ) -> tuple[_State, jax.Array]:
        work, microbatch = self.work, own["backward_microbatch"]
        dy = _at(state.gradients, own["gradient_read"])
        dy = jnp.where(microbatch >= 0, dy, IDLE)
        if self.in_order:
            dy = follow(dy, state.done)
        kept = [_at(buffer, own["saved_read"]) for buffer in state.saved]
        dx, block_gradients = work.stage_gradient(
            jnp.maximum(own["backward_chunk"], 0),
            jnp.maximum(microbatch, 0),
            jax.tree.unflatten(jax.tree.structure(self._kept()), kept),
            self._laid_out(dy),
            state.block_gradients,
            microbatch >= 0,
        )
        at_start = (own["backward_stage"] == 0) & (microbatch >= 0)
        first = jnp.where(at_start, dx, 0)
        embedded = row["embedded_back"]
        end_gradients, input_gradients, done = work.embed_gradient(
            jnp.maximum(embedded, 0), first
        )
        state = dataclasses.replace(
            state,
            block_gradients=block_gradients,
            end_gradients=_add(state.end_gradients, end_gradients, embedded >= 0),
            input_gradients=jax.tree.map(
                lambda buffer, value: _write(buffer, embedded, value),
                state.input_gradients,
                input_gradients,
            ),
            done=done + self._zero(dx) if self.in_order else state.done,
        )
        return state, dx

    def _hop(
        self, state: _State, own: dict, up: jax.Array | None, down: jax.Array | None
    ) -> _State:
        done = state.done if self.in_order else None
        inputs, gradients = state.inputs, state.gradients
        if up is not None:
            for at, hop in enumerate(self.table.input_hops):
                arrived, done = self._permute(up, hop, "stage_forward", done)
                inputs = _write(inputs, own["input_write"][at], arrived)
        if down is not None:
            for at, hop in enumerate(self.table.gradient_hops):
                arrived, done = self._permute(down, hop, "stage_backward", done)
                gradients = _write(gradients, own["gradient_write"][at], arrived)
        return dataclasses.replace(
            state,
            inputs=self._laid_out(inputs),
            gradients=self._laid_out(gradients),
            done=state.done if done is None else done,
        )

    def _permute(
        self, x: jax.Array, hop: int, reason: str, done: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        num_ranks = self.table.forward_stage.shape[1]
        pairs = [(rank, (rank + hop) % num_ranks) for rank in range(num_ranks)]

        def local(x: jax.Array) -> jax.Array:
            with asked(reason):
                return lax.ppermute(x, STAGE, pairs)

        spec = self.work.spec
        x = follow(x, done)
        arrived = on_parts(
            local, x, specs=(spec,), out_specs=spec, mesh_axes=set(spec_axes(spec))
        )
        return arrived, None if done is None else self._zero(arrived)

    def _kept(self) -> Any:
        """Shapes of what a stage keeps of one microbatch."""
        first = jnp.asarray(0)
        return jax.eval_shape(
            lambda x: self.work.stage_keeping(first, first, x)[2], self.work.x
        )

    def _zero(self, x: jax.Array) -> Zero:
        return zero_on_parts(x, self.work.spec)

    def _laid_out(self, x: jax.Array) -> jax.Array:
        spec = self.work.spec
        if not spec_axes(spec):
            return x
        leading = (None,) * (x.ndim - len(spec))
        mesh = jax.sharding.get_abstract_mesh()
        sharding = NamedSharding(mesh, PartitionSpec(*leading, *spec))
        return lax.with_sharding_constraint(x, sharding)


def _zeros(shapes: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda value: jnp.zeros(value.shape, dtype), shapes)


def _at(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    return part(buffer, jnp.maximum(slot, 0))


def _write(buffer: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
    """`buffer` with `value` in that slot; as it was where the slot is negative."""
    value = jnp.where(slot >= 0, value.astype(buffer.dtype), _at(buffer, slot))
    return lax.dynamic_update_index_in_dim(buffer, value, jnp.maximum(slot, 0), 0)


def _add(total: Any, more: Any, counts: jax.Array) -> Any:
    """Adds where it counts; what does not may be NaN."""
    return jax.tree.map(
        lambda one, other: one + jnp.where(counts, other.astype(one.dtype), 0),
        total,
        more,
    )
