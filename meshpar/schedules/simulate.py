"""Replay of a schedule: every rank does its next action once its inputs are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

from meshpar.errors import InputError
from meshpar.schedules.base import Action, Op, Schedule
from meshpar.schedules.check import check_schedule

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
        """The same times on every stage."""
        return cls(
            forward_s=(forward_s,) * num_stages,
            input_grad_s=(input_grad_s,) * num_stages,
            weight_grad_s=(weight_grad_s,) * num_stages,
        )

    def of(self, action: Action) -> float:
        """Seconds of one action."""
        stage = action.stage
        if action.op is Op.F:
            return self.forward_s[stage]
        if action.op is Op.I:
            return self.input_grad_s[stage]
        if action.op is Op.W:
            return self.weight_grad_s[stage]
        return self.input_grad_s[stage] + self.weight_grad_s[stage]

    def slowest_s(self, schedule: Schedule) -> tuple[float, float]:
        """Seconds of the longest forward of a schedule, and of its longest backward."""
        forward_s = [self.of(one) for one in schedule.actions if one.op is Op.F]
        backward_s = [self.of(one) for one in schedule.actions if one.op is not Op.F]
        return max(forward_s), max(backward_s)


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
        """Time that the ranks compute, all together."""
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


def idle_fraction(span_s: float, all_ranks_work_s: float, num_ranks: int) -> float:
    """The part of `num_ranks` spans that is no work; 0 if the span is 0."""
    all_ranks_span_s = span_s * num_ranks
    if not all_ranks_span_s:
        return 0.0
    return float((all_ranks_span_s - all_ranks_work_s) / all_ranks_span_s)


def simulate(
    schedule: Schedule, times: StageTimes | None = None, *, hop_s: float | Hop = 0
) -> Timeline:
    """The timeline of ranks that wait for nothing but their inputs.

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
        end_s[action] = start_s + times.of(action)
        events.append(Event(action, start_s, end_s[action]))
