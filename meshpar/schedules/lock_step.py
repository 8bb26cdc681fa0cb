"""The timeline of ranks that move together, tick by tick, as the training step does."""

from __future__ import annotations

from meshpar.schedules.base import Action, Op, Schedule
from meshpar.schedules.simulate import Event, StageTimes, Timeline
from meshpar.schedules.ticks import lock_step_ticks


def lock_step_timeline(schedule: Schedule, times: StageTimes) -> Timeline:
    """What each rank computes when; a tick takes the slowest stage's F, then its B.

    Where any rank has a forward, all run one, those without work on zeros: what is of
    no use is idle here. Hops take no time.

    Raises:
        ScheduleError: The schedule is wrong.

    Example:
        >>> from meshpar.schedules import make_schedule
        >>> schedule = make_schedule("1f1b", 2, 3)
        >>> lock_step_timeline(schedule, StageTimes.uniform(2)).end_s
        12
    """
    ticks = lock_step_ticks(schedule)

    def half_of(action: Action) -> tuple[int, bool]:
        return ticks[action], action.op is not Op.F

    forward_s, backward_s = times.slowest_s(schedule)
    start_s: dict[tuple[int, bool], float] = {}
    now_s: float = 0
    for half in sorted(set(map(half_of, ticks))):
        start_s[half] = now_s
        _, is_backward = half
        now_s += backward_s if is_backward else forward_s

    def event(action: Action) -> Event:
        start = start_s[half_of(action)]
        return Event(action, start, start + times.of(action))

    orders = (sorted(order, key=half_of) for order in schedule.orders)
    return Timeline(schedule, tuple(tuple(map(event, order)) for order in orders))
