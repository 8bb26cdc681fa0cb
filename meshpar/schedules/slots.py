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
from collections.abc import Iterable
from typing import NamedTuple

from meshpar.schedules.base import Action, Op, Schedule


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
    """What each forward keeps on its rank, until its B, or its W."""
    return [
        _lifetime(
            schedule, action, (tick, Moment.FORWARD), _backward_read(ticks, action)
        )
        for action, tick in ticks.items()
        if action.op is Op.F
    ]


def input_lifetimes(schedule: Schedule, ticks: dict[Action, int]) -> list[Lifetime]:
    """Activations that arrived, until the forward that reads them."""
    return [
        _lifetime(
            schedule, action, (ticks[source], Moment.ARRIVAL), (tick, Moment.FORWARD)
        )
        for action, tick in ticks.items()
        if action.op is Op.F
        for source in schedule.inputs(action)
    ]


def gradient_lifetimes(schedule: Schedule, ticks: dict[Action, int]) -> list[Lifetime]:
    """Gradients that arrived, or came from the loss, until the last reader."""
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


def slots_of(lifetimes: Iterable[Lifetime]) -> dict[tuple[int, int], int]:
    """The slot of each (stage, microbatch) in its rank's buffer."""
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
        """The lowest slot that is free when the value is written."""
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
