"""Buffer slots: values that are live at once never share one (interval colouring).

In each tick a rank runs its forward, then the loss of the last stage, then its
backward, then a weight gradient, then receives what others sent. A value is live from
the moment it is written to the last moment it is read; a slot read in one moment may be
written in a later one of the same tick. Taking the lowest free slot in order of writing
needs exactly as many slots as values are live at once, the least possible for
intervals.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from meshpar.schedules.base import Action, Op, Schedule
from meshpar.schedules.check import check_schedule
from meshpar.schedules.simulate import StageTimes
from meshpar.schedules.ticks import (
    Phase,
    cut_phases,
    divergent_ticks,
    lock_step_ticks,
    tick_phases,
)


class Moment(enum.IntEnum):
    """The parts of a tick, in order."""

    FORWARD = 0
    LOSS = 1
    BACKWARD = 2
    WEIGHT_GRAD = 3
    ARRIVAL = 4


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
    """Return what each forward keeps on its rank, until its B, or its I."""
    return [
        _lifetime(
            schedule, action, (tick, Moment.FORWARD), _backward_read(ticks, action)
        )
        for action, tick in ticks.items()
        if action.op is Op.F
    ]


def stash_lifetimes(schedule: Schedule, ticks: dict[Action, int]) -> list[Lifetime]:
    """Return what each I leaves for its W."""
    return [
        _lifetime(
            schedule,
            action,
            (ticks[action._replace(op=Op.I)], Moment.BACKWARD),
            (tick, Moment.WEIGHT_GRAD),
        )
        for action, tick in ticks.items()
        if action.op is Op.W
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
    """Return the gradients that arrive or come from the loss, until B or I."""
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
    split = action._replace(op=Op.I)
    reader = split if split in ticks else action._replace(op=Op.B)
    return ticks[reader], Moment.BACKWARD


if TYPE_CHECKING:
    import numpy as np

NONE = -1
"""No action, no slot, no rank."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TickTable:
    """Every rank's work in every tick, and its buffer slots.

    Every array is int32 of shape (ticks, ranks), or (ticks, ranks, hops) where a value
    arrives, and holds -1 where there is nothing. A hop by `n` sends from every rank `r`
    to `(r + n) % ranks`; a ring of stages has one for activations, one for gradients.
    A tick runs in this order (`Moment`): forwards; the loss of the last stage's
    forward; backwards; weight gradients; the hops, whose values are written at the
    tick's end. A slot is written and read in the same tick only in that order. Where a
    schedule splits any backward, all are split: a B is an I and a W.

    Args:
        forward_stage: Stage of the forward.
        forward_chunk: That stage as one of its rank's chunks, 0 first.
        forward_microbatch: Its microbatch.
        backward_stage: Stage of the backward, whole or for the input.
        backward_chunk: That stage as one of its rank's chunks.
        backward_microbatch: Its microbatch.
        weight_grad_stage: Stage of the weight gradient.
        weight_grad_chunk: That stage as one of its rank's chunks.
        weight_grad_microbatch: Its microbatch.
        saved_write: Slot in which the forward keeps what its backward needs.
        saved_read: Slot from which the backward takes it.
        stash_write: Slot in which the input gradient leaves what its weight gradient
            needs.
        stash_read: Slot from which the weight gradient takes it.
        input_read: Slot of the activation that the forward takes; -1 on stage 0.
        input_write: Slot for the activation that arrives at the tick's end.
        loss_write: Slot for the gradient of the loss of the last stage's forward.
        gradient_read: Slot of the gradient that the backward takes.
        gradient_write: Slot for the gradient that arrives at the tick's end.
        input_hops: The hops of activations: (1,) for a ring, with 0 where a V turns.
        gradient_hops: The hops of gradients: (ranks - 1,) for a ring.
        phases: Static runs of ticks with forwards, backwards or both, in order.
        saved_slots: Slots that each rank needs: its microbatches in flight.
        stash_slots: Slots that each rank needs for pending weight gradients.
        input_slots: Slots that each rank needs for activations.
        gradient_slots: Slots that each rank needs for gradients, those of the loss
            included.
    """

    forward_stage: np.ndarray
    forward_chunk: np.ndarray
    forward_microbatch: np.ndarray
    backward_stage: np.ndarray
    backward_chunk: np.ndarray
    backward_microbatch: np.ndarray
    weight_grad_stage: np.ndarray
    weight_grad_chunk: np.ndarray
    weight_grad_microbatch: np.ndarray
    saved_write: np.ndarray
    saved_read: np.ndarray
    stash_write: np.ndarray
    stash_read: np.ndarray
    input_read: np.ndarray
    input_write: np.ndarray
    loss_write: np.ndarray
    gradient_read: np.ndarray
    gradient_write: np.ndarray
    input_hops: tuple[int, ...]
    gradient_hops: tuple[int, ...]
    phases: tuple[Phase, ...]
    saved_slots: tuple[int, ...]
    stash_slots: tuple[int, ...]
    input_slots: tuple[int, ...]
    gradient_slots: tuple[int, ...]

    @property
    def gradient_arrival(self) -> np.ndarray:
        """`gradient_write`, each tick's put off to the next one that has a backward.

        Also of a backward that no rank does, if its phase has them: it sends zeros on.
        Nothing reads a gradient before that, and its slot holds nothing else.
        """
        import numpy as np

        phases = [phase for phase in self.phases if phase.has_backward]
        backward = [tick for at in phases for tick in range(at.start, at.stop)]
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
        return sum(p.stop - p.start for p in self.phases if p.has_forward)

    @property
    def num_backward_ticks(self) -> int:
        """Ticks in which any rank does a backward, whole or for the input."""
        return sum(p.stop - p.start for p in self.phases if p.has_backward)

    @property
    def num_weight_grad_ticks(self) -> int:
        """Ticks in which any rank does a weight gradient."""
        return sum(p.stop - p.start for p in self.phases if p.has_weight_grad)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Most microbatches in flight on each rank in lock step."""
        return self.saved_slots


def lock_step_span_s(
    schedule: Schedule, table: TickTable, times: StageTimes, *, hop_s: float = 0
) -> float:
    """Return the time of a step in which all ranks run the same program every tick.

        span = forward ticks * F + backward ticks * B + ticks * hop

    with the slowest stage's F and B: ranks with nothing to do compute on zeros. Where
    backwards are split, `backward ticks * I + weight gradient ticks * W` in place of B.
    """
    splits = schedule.splits_backward
    backward_s = (
        times.input_grad_s
        if splits
        else [
            sum(pair)
            for pair in zip(times.input_grad_s, times.weight_grad_s, strict=True)
        ]
    )
    num_hops = table.num_ticks if schedule.num_ranks > 1 else 0
    return (
        table.num_forward_ticks * max(times.forward_s)
        + table.num_backward_ticks * max(backward_s)
        + table.num_weight_grad_ticks * max(times.weight_grad_s)
        + num_hops * hop_s
    )


ARRAYS = tuple(field.name for field in fields(TickTable) if field.type == "np.ndarray")
"""The arrays of a `TickTable`."""

_RECEIVED = ("input_write", "gradient_write")


def tick_table(
    schedule: Schedule, *, divergent: bool = False, paired: bool = False
) -> TickTable:
    """Return the ticks of a schedule.

    Args:
        schedule: The order of every rank's work.
        divergent: True if each rank does an action of its own in a tick
            (`divergent_ticks`), False for lock step (`lock_step_ticks`).
        paired: As for `lock_step_ticks`.

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

    check_schedule(schedule)
    if schedule.splits_backward:
        schedule = schedule.with_split_backwards()
    ticks = (
        divergent_ticks(schedule)
        if divergent
        else lock_step_ticks(schedule, paired=paired)
    )
    slots = _Slots(
        stash=assign_slots(stash_lifetimes(schedule, ticks)),
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
        entries = _ENTRIES[action.op]
        for name, where, value in entries(schedule, action, slots, hops):
            arrays[name][tick, *where] = value
    phases = tick_phases(ticks, divergent=divergent)
    if paired:
        # The first loss comes a tick before the first backward: no head until then.
        phases = cut_phases(phases, ticks[Action(schedule.num_stages - 1, Op.F, 0)])
    return TickTable(
        **arrays,
        input_hops=hops,
        gradient_hops=tuple(-hop % schedule.num_ranks for hop in hops),
        phases=phases,
        saved_slots=_slots_per_rank(schedule, slots.saved),
        stash_slots=_slots_per_rank(schedule, slots.stash),
        input_slots=_slots_per_rank(schedule, slots.inputs),
        gradient_slots=_slots_per_rank(schedule, slots.gradients),
    )


class _Slots(NamedTuple):
    """Slots by the (stage, microbatch) that reads them."""

    saved: dict[tuple[int, int], int]
    inputs: dict[tuple[int, int], int]
    gradients: dict[tuple[int, int], int]
    stash: dict[tuple[int, int], int]


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
    """Yield the entries of a B or I, in the same form."""
    stage, op, microbatch = action
    rank = schedule.rank_of_stage[stage]
    yield "backward_stage", (rank,), stage
    yield "backward_chunk", (rank,), schedule.stages_of_rank[rank].index(stage)
    yield "backward_microbatch", (rank,), microbatch
    yield "saved_read", (rank,), slots.saved[stage, microbatch]
    yield "gradient_read", (rank,), slots.gradients[stage, microbatch]
    if op is Op.I:
        yield "stash_write", (rank,), slots.stash[stage, microbatch]
    if stage > 0:
        hop = hops.index(_hop(schedule, stage - 1))
        where = schedule.rank_of_stage[stage - 1], hop
        yield "gradient_write", where, slots.gradients[stage - 1, microbatch]


def _weight_grad(
    schedule: Schedule, action: Action, slots: _Slots, hops: tuple[int, ...]
) -> Entries:
    """Yield the entries of a W, in the same form."""
    del hops  # nothing is sent
    stage, _, microbatch = action
    rank = schedule.rank_of_stage[stage]
    yield "weight_grad_stage", (rank,), stage
    yield "weight_grad_chunk", (rank,), schedule.stages_of_rank[rank].index(stage)
    yield "weight_grad_microbatch", (rank,), microbatch
    yield "stash_read", (rank,), slots.stash[stage, microbatch]


_ENTRIES = {Op.F: _forward, Op.B: _backward, Op.I: _backward, Op.W: _weight_grad}
"""Function that yields the entries of each kind of action."""


def _slots_per_rank(
    schedule: Schedule, slots: dict[tuple[int, int], int]
) -> tuple[int, ...]:
    counts = [0] * schedule.num_ranks
    for (stage, _), slot in slots.items():
        rank = schedule.rank_of_stage[stage]
        counts[rank] = max(counts[rank], slot + 1)
    return tuple(counts)
