"""What holds of a timeline over time: its phases, and what each rank has in flight."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from meshpar.schedules.base import Op
from meshpar.schedules.simulate import Event, Timeline


class Span(NamedTuple):
    """A phase of a timeline, `start_s` to `end_s`."""

    name: str
    start_s: float
    end_s: float


class Count(NamedTuple):
    """Microbatches (of a chunk each) in flight from `since_s` on."""

    since_s: float
    number: int


def spans(timeline: Timeline) -> tuple[Span, ...]:
    """Warm-up until the first backward of any rank, cool-down from the last forward.

    What lies between is steady; a phase that takes no time is left out (GPipe has none
    that is steady).

    Example:
        >>> from meshpar.schedules import make_schedule, simulate
        >>> for span in spans(simulate(make_schedule("1f1b", 2, 3))):
        ...     print(*span)
        warm-up 0 2
        steady 2 8
        cool-down 8 12
    """
    every = [event for events in timeline.events for event in events]
    first = min(event.start_s for event in every if event.action.op is not Op.F)
    last = max(event.end_s for event in every if event.action.op is Op.F)
    last = max(first, last)
    found = (
        Span("warm-up", 0, first),
        Span("steady", first, last),
        Span("cool-down", last, timeline.end_s),
    )
    return tuple(span for span in found if span.end_s > span.start_s)


def in_flight(timeline: Timeline) -> tuple[tuple[Count, ...], ...]:
    """What each rank keeps for backwards: from a forward's start to its B's (W's) end.

    Example:
        >>> from meshpar.schedules import make_schedule, simulate
        >>> _, last = in_flight(simulate(make_schedule("1f1b", 2, 2)))
        >>> [*map(tuple, last)]
        [(0, 0), (1, 1), (7, 0)]
    """
    return tuple(map(_of_rank, timeline.events))


def _of_rank(events: tuple[Event, ...]) -> tuple[Count, ...]:
    # What is given back as another comes is no change.
    held_from: dict[float, int] = {0: 0}
    held = 0
    for action, start_s, end_s in events:
        if action.op is Op.F:
            held += 1
            held_from[start_s] = held
        elif action.op is not Op.I:
            held -= 1
            held_from[end_s] = held
    changes = groupby(held_from.items(), key=itemgetter(1))
    return tuple(Count(*next(same)) for _, same in changes)
