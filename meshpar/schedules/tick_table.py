"""A schedule in lock step as integer arrays: what an executor reads, tick by tick."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from meshpar.schedules.base import Action, Op, Schedule
from meshpar.schedules.slots import (
    gradient_lifetimes,
    input_lifetimes,
    saved_lifetimes,
    slots_of,
)
from meshpar.schedules.ticks import Phase, lock_step_ticks, phases_of

NONE = -1
"""No action, no slot, no rank."""

BACKWARD_OPS = (Op.B, Op.I, Op.W)
"""What the numbers of `TickTable.backward_op` mean."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TickTable:
    """What every rank does in every tick, and in which buffer slots.

    Every array is int32 of shape (ticks, ranks) and holds -1 where there is nothing.
    A tick runs in this order (`slots.Moment`): forwards; the loss of the last stage's
    forward; backwards; the two hops, whose values are written at the tick's end. A slot
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
        input_from: The rank that sent it (the own rank where a V turns).
        loss_write: Slot for the gradient of the loss of the last stage's forward.
        gradient_read: Slot of the gradient that the backward takes.
        gradient_write: Slot for the gradient that arrives at the tick's end.
        gradient_from: The rank that sent it.
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
    input_from: np.ndarray
    loss_write: np.ndarray
    gradient_read: np.ndarray
    gradient_write: np.ndarray
    gradient_from: np.ndarray
    phases: tuple[Phase, ...]
    saved_slots: tuple[int, ...]
    input_slots: tuple[int, ...]
    gradient_slots: tuple[int, ...]

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


_ARRAYS = tuple(field.name for field in fields(TickTable))[:-4]


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
    ticks = lock_step_ticks(schedule)
    shape = (max(ticks.values()) + 1, schedule.num_ranks)
    arrays = {name: np.full(shape, NONE, np.int32) for name in _ARRAYS}
    slots = _Slots(
        saved=slots_of(saved_lifetimes(schedule, ticks)),
        inputs=slots_of(input_lifetimes(schedule, ticks)),
        gradients=slots_of(gradient_lifetimes(schedule, ticks)),
    )
    for action, tick in ticks.items():
        entries = _forward if action.op is Op.F else _backward
        for name, rank, value in entries(schedule, action, slots):
            arrays[name][tick, rank] = value
    return TickTable(
        **arrays,
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


Entries = Iterator[tuple[str, int, int]]


def _forward(schedule: Schedule, action: Action, slots: _Slots) -> Entries:
    """What a forward puts into its tick: (array, rank, value)."""
    stage, _, microbatch = action
    rank = schedule.rank_of_stage[stage]
    yield "forward_stage", rank, stage
    yield "forward_chunk", rank, schedule.stages_of_rank[rank].index(stage)
    yield "forward_microbatch", rank, microbatch
    yield "saved_write", rank, slots.saved[stage, microbatch]
    if stage > 0:
        yield "input_read", rank, slots.inputs[stage, microbatch]
    if stage == schedule.num_stages - 1:
        yield "loss_write", rank, slots.gradients[stage, microbatch]
    else:
        receiver = schedule.rank_of_stage[stage + 1]
        yield "input_write", receiver, slots.inputs[stage + 1, microbatch]
        yield "input_from", receiver, rank


def _backward(schedule: Schedule, action: Action, slots: _Slots) -> Entries:
    """What a B, I or W puts into its tick: (array, rank, value)."""
    stage, op, microbatch = action
    rank = schedule.rank_of_stage[stage]
    yield "backward_op", rank, BACKWARD_OPS.index(op)
    yield "backward_stage", rank, stage
    yield "backward_chunk", rank, schedule.stages_of_rank[rank].index(stage)
    yield "backward_microbatch", rank, microbatch
    yield "saved_read", rank, slots.saved[stage, microbatch]
    yield "gradient_read", rank, slots.gradients[stage, microbatch]
    if op is not Op.W and stage > 0:
        receiver = schedule.rank_of_stage[stage - 1]
        yield "gradient_write", receiver, slots.gradients[stage - 1, microbatch]
        yield "gradient_from", receiver, rank


def _slots_per_rank(
    schedule: Schedule, slots: dict[tuple[int, int], int]
) -> tuple[int, ...]:
    counts = [0] * schedule.num_ranks
    for (stage, _), slot in slots.items():
        rank = schedule.rank_of_stage[stage]
        counts[rank] = max(counts[rank], slot + 1)
    return tuple(counts)
