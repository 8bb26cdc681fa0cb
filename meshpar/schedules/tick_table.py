"""Buffer slots: values that are live at once never share one (interval colouring).

In each tick a rank runs its forward, then the loss of the last stage, then its
backward, then receives what others sent. A value is live from the moment it is written
to the last moment it is read; a slot read in one moment may be written in a later one
of the same tick. Taking the lowest free slot in order of writing needs exactly as many
slots as values are live at once, the least possible for intervals.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from meshpar.schedules.base import Action, Op, Schedule
from meshpar.schedules.simulate import Phase, StageTimes, lock_step_ticks, tick_phases


class Moment(enum.IntEnum):
    """The parts of a tick, in order."""

    FORWARD = 0
    LOSS = 1
    BACKWARD = 2
    ARRIVAL = 3


class Lifetime(NamedTuple):
    """A value in a rank's buffer, named by the stage and microbatch that read it.

    `written` and `read` (for the last time) are each (tick, moment).
    """

    rank: int
    stage: int
    microbatch: int
    written: tuple[int, Moment]
    read: tuple[int, Moment]


def saved_lifetimes(schedule: Schedule, ticks: dict[Action, int]) -> list[Lifetime]:
    """Return what each forward keeps on its rank, until its B, or its W."""
    return [
        _lifetime(
            schedule, action, (tick, Moment.FORWARD), _backward_read(ticks, action)
        )
        for action, tick in ticks.items()
        if action.op is Op.F
    ]


def input_lifetimes(schedule: Schedule, ticks: dict[Action, int]) -> list[Lifetime]:
    """Return the activations that arrive, until the forward that reads them."""
    return [
        _lifetime(
            schedule, action, (ticks[source], Moment.ARRIVAL), (tick, Moment.FORWARD)
        )
        for action, tick in ticks.items()
        if action.op is Op.F
        for source in schedule.inputs(action)
    ]


def gradient_lifetimes(schedule: Schedule, ticks: dict[Action, int]) -> list[Lifetime]:
    """Return the gradients that arrive or come from the loss, until the last reader."""
    lifetimes = []
    for action in ticks:
        if action.op not in (Op.B, Op.I):
            continue
        *_, source = schedule.inputs(action)
        moment = Moment.LOSS if source.op is Op.F else Moment.ARRIVAL
        written = (ticks[source], moment)
        read = _backward_read(ticks, action)
        lifetimes.append(_lifetime(schedule, action, written, read))
    return lifetimes


def assign_slots(lifetimes: Iterable[Lifetime]) -> dict[tuple[int, int], int]:
    """Assign each (stage, microbatch) a slot in its rank's buffer."""
    buffers: dict[int, _Buffer] = {}
    return {
        (lifetime.stage, lifetime.microbatch): buffers.setdefault(
            lifetime.rank, _Buffer()
        ).take(lifetime)
        for lifetime in sorted(lifetimes, key=lambda value: value.written)
    }


class _Buffer:
    """The slots of one rank, taken in order of writing."""

    def __init__(self) -> None:
        self._num_slots = 0
        self._free: list[int] = []
        self._live: list[tuple[tuple[int, Moment], int]] = []

    def take(self, lifetime: Lifetime) -> int:
        """Return the lowest slot that is free when the value is written."""
        while self._live and self._live[0][0] < lifetime.written:
            heapq.heappush(self._free, heapq.heappop(self._live)[1])
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = self._num_slots
            self._num_slots += 1
        heapq.heappush(self._live, (lifetime.read, slot))
        return slot


def _lifetime(
    schedule: Schedule,
    reader: Action,
    written: tuple[int, Moment],
    read: tuple[int, Moment],
) -> Lifetime:
    rank = schedule.rank_of_stage[reader.stage]
    return Lifetime(rank, reader.stage, reader.microbatch, written, read)


def _backward_read(ticks: dict[Action, int], action: Action) -> tuple[int, Moment]:
    weights = action._replace(op=Op.W)
    last = weights if weights in ticks else action._replace(op=Op.B)
    return ticks[last], Moment.BACKWARD


if TYPE_CHECKING:
    import numpy as np

NONE = -1
"""No action, no slot, no rank."""

BACKWARD_OPS = (Op.B, Op.I, Op.W)
"""Operation of each number in `TickTable.backward_op`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TickTable:
    """Every rank's work in every tick, and its buffer slots.

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
        """Number of ticks of the step."""
        return len(self.forward_stage)

    @property
    def num_forward_ticks(self) -> int:
        """Ticks in which any rank does a forward: all ranks pay for it."""
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
    """Return the time of a step in which all ranks run the same program every tick.

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
    """Return the lock step of a schedule.

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
        saved=assign_slots(saved_lifetimes(schedule, ticks)),
        inputs=assign_slots(input_lifetimes(schedule, ticks)),
        gradients=assign_slots(gradient_lifetimes(schedule, ticks)),
    )
    hops = tuple(
        sorted({_hop(schedule, stage) for stage in range(schedule.num_stages - 1)})
    )
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
        phases=tick_phases(ticks),
        saved_slots=_slots_per_rank(schedule, slots.saved),
        input_slots=_slots_per_rank(schedule, slots.inputs),
        gradient_slots=_slots_per_rank(schedule, slots.gradients),
    )


class _Slots(NamedTuple):
    """Slots by the (stage, microbatch) that reads them."""

    saved: dict[tuple[int, int], int]
    inputs: dict[tuple[int, int], int]
    gradients: dict[tuple[int, int], int]


def _hop(schedule: Schedule, stage: int) -> int:
    """Return how far activations go from a stage to the next, modulo the ranks."""
    ranks = schedule.rank_of_stage
    return (ranks[stage + 1] - ranks[stage]) % schedule.num_ranks


Entries = Iterator[tuple[str, tuple[int, ...], int]]


def _forward(
    schedule: Schedule, action: Action, slots: _Slots, hops: tuple[int, ...]
) -> Entries:
    """Yield a forward's entries of its tick: (array, index after the tick, value)."""
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
    """Yield the entries of a B, I or W, in the same form."""
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
