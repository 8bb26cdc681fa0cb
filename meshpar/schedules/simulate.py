"""Replay of a schedule: every rank does its next action once its inputs are there.

Also what a timeline shows over time: its phases, and the microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from meshpar.errors import InputError, renamed
from meshpar.schedules.base import Action, Op, Schedule
from meshpar.schedules.check import check_schedule
from meshpar.schedules.render import timeline_html

Hop = Callable[[Action, Action], float]
"""Seconds from the end of an action on one rank until an action on another can read
it; minus infinity where that one does not wait."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of F, I and W of one microbatch, one number a stage; B takes I + W."""

    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]

    def __post_init__(self) -> None:
        for field in fields(self):
            times = tuple(getattr(self, field.name))
            object.__setattr__(self, field.name, times)
            if len(times) != len(self.forward_s):
                raise InputError(
                    f"{field.name} has {len(times)} times and forward_s "
                    f"{len(self.forward_s)}; give one a stage",
                    key="schedule.uneven_times",
                )
            for time in times:
                if not 0 <= time < float("inf"):
                    raise InputError(
                        f"{field.name}={time}: must be a finite number, 0 or more",
                        key="schedule.wrong_time",
                    )

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward_s: float = 1,
        input_grad_s: float = 1,
        weight_grad_s: float = 1,
    ) -> StageTimes:
        """Return the same times for every stage."""
        return cls(
            forward_s=(forward_s,) * num_stages,
            input_grad_s=(input_grad_s,) * num_stages,
            weight_grad_s=(weight_grad_s,) * num_stages,
        )

    def action_s(self, action: Action) -> float:
        """Return the seconds of one action."""
        stage = action.stage
        if action.op is Op.F:
            return self.forward_s[stage]
        if action.op is Op.I:
            return self.input_grad_s[stage]
        if action.op is Op.W:
            return self.weight_grad_s[stage]
        return self.input_grad_s[stage] + self.weight_grad_s[stage]

    of = renamed("StageTimes.of", action_s)


class Event(NamedTuple):
    """One action and when it ran."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """When every rank did what.

    Args:
        schedule: What ran.
        events: Each rank's events, first to last.
    """

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]

    @property
    def end_s(self) -> float:
        """End of the last event; the first starts at 0."""
        return max(events[-1].end_s for events in self.events)

    @property
    def span_s(self) -> float:
        """The longest time from a rank's first start to its last end."""
        return max(events[-1].end_s - events[0].start_s for events in self.events)

    @cached_property
    def all_ranks_work_s(self) -> float:
        """Seconds that the ranks compute, added up over the ranks."""
        return sum(
            event.end_s - event.start_s for events in self.events for event in events
        )

    @property
    def bubble_fraction(self) -> float:
        """Idle part of the longest rank's span, over all ranks.

            bubble = (span - work) / span

        with a rank's work, or the mean where ranks differ; 0 if nothing takes time.

        Reference: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section
        5.3, where all stages do the same work.
        """
        return idle_fraction(
            self.span_s, self.all_ranks_work_s, self.schedule.num_ranks
        )

    def _repr_html_(self) -> str:
        return timeline_html(self)


def idle_fraction(span_s: float, all_ranks_work_s: float, num_ranks: int) -> float:
    """Return the idle part of `num_ranks` spans; 0 if the span is 0."""
    all_ranks_span_s = span_s * num_ranks
    if not all_ranks_span_s:
        return 0.0
    return float((all_ranks_span_s - all_ranks_work_s) / all_ranks_span_s)


def simulate(
    schedule: Schedule, times: StageTimes | None = None, *, hop_s: float | Hop = 0
) -> Timeline:
    """Return the timeline of ranks that wait for nothing but their inputs.

    Args:
        schedule: What to replay.
        times: Seconds of the actions; one second each of F, I and W when left out.
        hop_s: Latency between two ranks, which keeps neither busy; a function of the
            action that sends and the one that reads where links differ.

    Raises:
        InputError: The schedule is wrong (`ScheduleError`), or the times are of
            another number of stages.
    """
    check_schedule(schedule)
    times = times or StageTimes.uniform(schedule.num_stages)
    if len(times.forward_s) != schedule.num_stages:
        raise InputError(
            f"times of {len(times.forward_s)} stages for a schedule of "
            f"{schedule.num_stages}; give one a stage",
            key="schedule.wrong_number_of_times",
        )
    hop = hop_s if callable(hop_s) else _same_hop(hop_s)
    events: list[list[Event]] = [[] for _ in schedule.orders]
    end_s: dict[Action, float] = {}
    while len(end_s) < len(schedule.actions):
        for rank, order in enumerate(schedule.orders):
            _run_while_ready(order, events[rank], end_s, schedule, times, hop)
    return Timeline(schedule, tuple(map(tuple, events)))


def _same_hop(hop_s: float) -> Hop:
    if not 0 <= hop_s < float("inf"):
        raise InputError(
            f"hop_s={hop_s}: must be a finite number, 0 or more",
            key="schedule.wrong_hop_time",
        )
    return lambda source, target: hop_s


def _run_while_ready(
    order: Sequence[Action],
    events: list[Event],
    end_s: dict[Action, float],
    schedule: Schedule,
    times: StageTimes,
    hop: Hop,
) -> None:
    """Appends the events of a rank until one's inputs are not known yet."""
    rank_of_stage = schedule.rank_of_stage
    while len(events) < len(order):
        action = order[len(events)]
        start_s = events[-1].end_s if events else 0
        for source in schedule.inputs(action):
            if source not in end_s:
                return
            same_rank = rank_of_stage[source.stage] == rank_of_stage[action.stage]
            latency_s = 0 if same_rank else hop(source, action)
            start_s = max(start_s, end_s[source] + latency_s)
        end_s[action] = start_s + times.action_s(action)
        events.append(Event(action, start_s, end_s[action]))


class Span(NamedTuple):
    """A phase of a timeline, `start_s` to `end_s`."""

    name: str
    start_s: float
    end_s: float


class Count(NamedTuple):
    """Microbatches (of a chunk each) in flight, or their memory, from `since_s` on."""

    since_s: float
    number: float


class Kept(NamedTuple):
    """Memory of one microbatch of a chunk; by default microbatches are counted.

    A forward keeps `forward` until its B or I, and an I leaves `stash` for its W.
    """

    forward: float = 1
    stash: float = 1


@dataclass(frozen=True)
class Memory:
    """Megabytes of one microbatch on one rank.

    Args:
        activation_mb: Megabytes that its forwards keep.
        stash: What its input gradients leave for the weight gradients, as a share.
    """

    activation_mb: float
    stash: float = 1

    def kept_mb(self, timeline: Timeline) -> Kept:
        """Return the megabytes of one chunk."""
        of_chunk_mb = self.activation_mb / timeline.schedule.num_chunks
        return Kept(of_chunk_mb, self.stash * of_chunk_mb)

    def peak_mb(self, timeline: Timeline) -> list[float]:
        """Return the most megabytes of each rank."""
        of_ranks = in_flight(timeline, self.kept_mb(timeline))
        return [max(count.number for count in counts) for counts in of_ranks]


def spans(timeline: Timeline) -> tuple[Span, ...]:
    """Return the phases: warm-up, steady, cool-down; without those that take no time.

    Warm-up lasts until the first backward of any rank, cool-down begins with the end of
    the last forward.

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


def in_flight(
    timeline: Timeline, kept: Kept | None = None
) -> tuple[tuple[Count, ...], ...]:
    """Return what each rank keeps until its B (or I and W) ends, over time.

    Args:
        timeline: When every rank did what.
        kept: What it keeps; forwards whose B or W has not ended are counted if absent.

    Example:
        >>> from meshpar.schedules import make_schedule, simulate
        >>> _, last = in_flight(simulate(make_schedule("1f1b", 2, 2)))
        >>> [*map(tuple, last)]
        [(0, 0), (1, 1), (7, 0)]
    """
    kept = kept or Kept()
    return tuple(_rank_in_flight(events, kept) for events in timeline.events)


def _rank_in_flight(events: tuple[Event, ...], kept: Kept) -> tuple[Count, ...]:
    # One is released as the next one comes: no change.
    held_from: dict[float, float] = {0: 0}
    number = {op: 0 for op in Op}
    for action, start_s, end_s in events:
        number[action.op] += 1
        # Counted anew each time, so that nothing is left by rounding.
        waiting = number[Op.F] - number[Op.B] - number[Op.I]
        held = kept.forward * waiting + kept.stash * (number[Op.I] - number[Op.W])
        held_from[start_s if action.op is Op.F else end_s] = held
    changes = groupby(held_from.items(), key=itemgetter(1))
    return tuple(Count(*next(same)) for _, same in changes)
