"""A schedule in lock step as integer arrays: what an executor reads, tick by tick."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from meshpar.schedules.base import Action, Op, Schedule
from meshpar.schedules.simulate import StageTimes
from meshpar.schedules.slots import (
    gradient_lifetimes,
    input_lifetimes,
    saved_lifetimes,
    slots_of,
)
from meshpar.schedules.ticks import Phase, lock_step_ticks, phases_of

if TYPE_CHECKING:
    import numpy as np

NONE = -1
"""No action, no slot, no rank."""

BACKWARD_OPS = (Op.B, Op.I, Op.W)
"""What the numbers of `TickTable.backward_op` mean."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TickTable:
    """What every rank does in every tick, and in which buffer slots.

    Every array is int32 of shape (ticks, ranks), or (ticks, ranks, hops) where a value
    arrives, and holds -1 where there is nothing. A hop by `n` sends from every rank `r`
    to `(r + n) % ranks`; a ring of stages has one for activations, one for gradients.
    A tick runs in this order (`slots.Moment`): forwards; the loss of the last stage's
    forward; backwards; the hops, whose values are written at the tick's end. A slot
    is written and read in the same tick only in that order.

    Args:
        forward_stage: Stage of the forward.
        forward_chunk: That stage as one of its rank's chunks, 0 first.
        forward_microbatch: Its microbatch.
        backward_op: Index into `BACKWARD_OPS`.
        backward_stage: Stage of the backward.
        backward_chunk: That stage as one of its rank's chunks.
        backward_microbatch: Its microbatch.
        saved_write: Slot in which the forward keeps what its backward needs.
        saved_read: Slot from which the backward takes it.
        input_read: Slot of the activation that the forward takes; -1 on stage 0.
        input_write: Slot for the activation that arrives at the tick's end.
        loss_write: Slot for the gradient of the loss of the last stage's forward.
        gradient_read: Slot of the gradient that the backward takes.
        gradient_write: Slot for the gradient that arrives at the tick's end.
        input_hops: The hops of activations: (1,) for a ring, with 0 where a V turns.
        gradient_hops: The hops of gradients: (ranks - 1,) for a ring.
        phases: Static runs of ticks with forwards, backwards or both, in order.
        saved_slots: Slots that each rank needs: its microbatches in flight.
        input_slots: Slots that each rank needs for activations.
        gradient_slots: Slots that each rank needs for gradients, those of the loss
            included.
    """

    forward_stage: np.ndarray
    forward_chunk: np.ndarray
    forward_microbatch: np.ndarray
    backward_op: np.ndarray
    backward_stage: np.ndarray
    backward_chunk: np.ndarray
    backward_microbatch: np.ndarray
    saved_write: np.ndarray
    saved_read: np.ndarray
    input_read: np.ndarray
    input_write: np.ndarray
    loss_write: np.ndarray
    gradient_read: np.ndarray
    gradient_write: np.ndarray
    input_hops: tuple[int, ...]
    gradient_hops: tuple[int, ...]
    phases: tuple[Phase, ...]
    saved_slots: tuple[int, ...]
    input_slots: tuple[int, ...]
    gradient_slots: tuple[int, ...]

    @property
    def gradient_arrival(self) -> np.ndarray:
        """`gradient_write`, each tick's put off to the next one that has a backward.

        Nothing reads a gradient before that, and its slot holds nothing else.
        """
        import numpy as np

        backward = np.flatnonzero((self.backward_stage >= 0).any(axis=1))
        later = np.full_like(self.gradient_write, NONE)
        later[backward[1:]] = self.gradient_write[backward[:-1]]
        return later

    @property
    def num_ticks(self) -> int:
        """Columns of the timeline."""
        return len(self.forward_stage)

    @property
    def num_forward_ticks(self) -> int:
        """Ticks in which any rank does a forward: what uniform execution pays F for."""
        return sum(stop - start for forward, _, start, stop in self.phases if forward)

    @property
    def num_backward_ticks(self) -> int:
        """Ticks in which any rank does a backward."""
        return sum(stop - start for _, backward, start, stop in self.phases if backward)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Most microbatches in flight on each rank in lock step."""
        return self.saved_slots


def lock_step_span_s(
    schedule: Schedule, table: TickTable, times: StageTimes, *, hop_s: float = 0
) -> float:
    """Time of a step in which all ranks run the same instructions every tick.

        span = forward ticks * F + backward ticks * B + ticks * hop

    with the slowest stage's F and B: ranks with nothing to do compute on zeros.
    """
    forward_s, backward_s = times.slowest_s(schedule)
    num_hops = table.num_ticks if schedule.num_ranks > 1 else 0
    return (
        table.num_forward_ticks * forward_s
        + table.num_backward_ticks * backward_s
        + num_hops * hop_s
    )


ARRAYS = tuple(field.name for field in fields(TickTable) if field.type == "np.ndarray")
"""The arrays of a `TickTable`."""

_RECEIVED = ("input_write", "gradient_write")


def tick_table(schedule: Schedule) -> TickTable:
    """The lock step of a schedule.

    Raises:
        ScheduleError: The schedule is wrong.

    Example:
        >>> from meshpar.schedules.one_f_one_b import one_f_one_b
        >>> table = tick_table(one_f_one_b(num_ranks=2, num_microbatches=3))
        >>> table.forward_microbatch.T.tolist()
        [[0, 1, 2, -1, -1], [-1, 0, 1, 2, -1]]
        >>> table.backward_microbatch.T.tolist()
        [[-1, -1, 0, 1, 2], [-1, 0, 1, 2, -1]]
        >>> table.peak_in_flight, len(table.phases)
        ((3, 1), 3)
    """
    import numpy as np  # here: to read a layout takes none of it

    ticks = lock_step_ticks(schedule)
    slots = _Slots(
        saved=slots_of(saved_lifetimes(schedule, ticks)),
        inputs=slots_of(input_lifetimes(schedule, ticks)),
        gradients=slots_of(gradient_lifetimes(schedule, ticks)),
    )
    hops = _hops(schedule)
    shape = (max(ticks.values()) + 1, schedule.num_ranks)
    arrays = {
        name: np.full(
            (*shape, len(hops)) if name in _RECEIVED else shape, NONE, "int32"
        )
        for name in ARRAYS
    }
    for action, tick in ticks.items():
        entries = _forward if action.op is Op.F else _backward
        for name, where, value in entries(schedule, action, slots, hops):
            arrays[name][tick, *where] = value
    return TickTable(
        **arrays,
        input_hops=hops,
        gradient_hops=tuple(-hop % schedule.num_ranks for hop in hops),
        phases=phases_of(ticks),
        saved_slots=_slots_per_rank(schedule, slots.saved),
        input_slots=_slots_per_rank(schedule, slots.inputs),
        gradient_slots=_slots_per_rank(schedule, slots.gradients),
    )


class _Slots(NamedTuple):
    """Slots by the (stage, microbatch) that reads them."""

    saved: dict[tuple[int, int], int]
    inputs: dict[tuple[int, int], int]
    gradients: dict[tuple[int, int], int]


def _hops(schedule: Schedule) -> tuple[int, ...]:
    """How far activations go from a stage to the next, modulo the ranks."""
    return tuple(
        sorted({_hop(schedule, stage) for stage in range(schedule.num_stages - 1)})
    )


def _hop(schedule: Schedule, stage: int) -> int:
    ranks = schedule.rank_of_stage
    return (ranks[stage + 1] - ranks[stage]) % schedule.num_ranks


Entries = Iterator[tuple[str, tuple[int, ...], int]]


def _forward(
    schedule: Schedule, action: Action, slots: _Slots, hops: tuple[int, ...]
) -> Entries:
    """What a forward puts into its tick: (array, index behind the tick's, value)."""
    stage, _, microbatch = action
    rank = schedule.rank_of_stage[stage]
    yield "forward_stage", (rank,), stage
    yield "forward_chunk", (rank,), schedule.stages_of_rank[rank].index(stage)
    yield "forward_microbatch", (rank,), microbatch
    yield "saved_write", (rank,), slots.saved[stage, microbatch]
    if stage > 0:
        yield "input_read", (rank,), slots.inputs[stage, microbatch]
    if stage == schedule.num_stages - 1:
        yield "loss_write", (rank,), slots.gradients[stage, microbatch]
    else:
        where = schedule.rank_of_stage[stage + 1], hops.index(_hop(schedule, stage))
        yield "input_write", where, slots.inputs[stage + 1, microbatch]


def _backward(
    schedule: Schedule, action: Action, slots: _Slots, hops: tuple[int, ...]
) -> Entries:
    """What a B, I or W puts into its tick, in the same form."""
    stage, op, microbatch = action
    rank = schedule.rank_of_stage[stage]
    yield "backward_op", (rank,), BACKWARD_OPS.index(op)
    yield "backward_stage", (rank,), stage
    yield "backward_chunk", (rank,), schedule.stages_of_rank[rank].index(stage)
    yield "backward_microbatch", (rank,), microbatch
    yield "saved_read", (rank,), slots.saved[stage, microbatch]
    yield "gradient_read", (rank,), slots.gradients[stage, microbatch]
    if op is not Op.W and stage > 0:
        hop = hops.index(_hop(schedule, stage - 1))
        where = schedule.rank_of_stage[stage - 1], hop
        yield "gradient_write", where, slots.gradients[stage - 1, microbatch]


def _slots_per_rank(
    schedule: Schedule, slots: dict[tuple[int, int], int]
) -> tuple[int, ...]:
    counts = [0] * schedule.num_ranks
    for (stage, _), slot in slots.items():
        rank = schedule.rank_of_stage[stage]
        counts[rank] = max(counts[rank], slot + 1)
    return tuple(counts)
