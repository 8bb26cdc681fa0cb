"""Lock step: the tick of every action when all ranks move together.

In a tick a rank does at most one forward, then at most one backward (B, I or W). What
another rank computed is there one tick later: activations and gradients hop at the end
of a tick. On its own rank a backward may read the forward of the same tick, so the last
stage's F and B of a microbatch share one.

A rank keeps the order of its forwards and the order of its backwards, and a backward
waits for all that its order puts before it; a forward does not wait for a backward, or
a tick's forward half would idle. So all ranks finish in the fewest ticks, and 1F1B has
up to 2 (S-r) - 1 microbatches in flight on rank r of S, not its asynchronous S-r.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from meshpar.schedules.base import Action, Op, Schedule
from meshpar.schedules.check import check_schedule
from meshpar.schedules.simulate import Event, StageTimes, Timeline

_Next = tuple[Action, Action | None]
"""An action of a rank, and the last forward before it in the rank's order."""


class Phase(NamedTuple):
    """A run of ticks, `start` to before `stop`, in which ranks do the same kinds."""

    has_forward: bool
    has_backward: bool
    start: int
    stop: int


def lock_step_ticks(schedule: Schedule) -> dict[Action, int]:
    """Return the tick of every action.

    Raises:
        ScheduleError: The schedule is wrong.

    Example:
        >>> orders = [[Action.parse("0F0"), Action.parse("0B0")]]
        >>> [*lock_step_ticks(Schedule(orders, 1, 1)).values()]
        [0, 0]
    """
    check_schedule(schedule)
    queues = [queue for order in schedule.orders for queue in _queues(order)]
    ticks: dict[Action, int] = {}
    tick = 0
    while any(queues):
        for queue in queues:
            if queue and _is_ready(schedule, *queue[0], ticks, tick):
                action, _ = queue.popleft()
                ticks[action] = tick
        tick += 1
    return ticks


def tick_phases(ticks: dict[Action, int]) -> tuple[Phase, ...]:
    """Return the longest runs of ticks in which the ranks do the same kinds of work."""
    forward = {tick for action, tick in ticks.items() if action.op is Op.F}
    backward = {tick for action, tick in ticks.items() if action.op is not Op.F}
    phases: list[Phase] = []
    for tick in range(max(ticks.values()) + 1):
        kinds = (tick in forward, tick in backward)
        if phases and phases[-1][:2] == kinds:
            phases[-1] = phases[-1]._replace(stop=tick + 1)
        else:
            phases.append(Phase(*kinds, tick, tick + 1))
    return tuple(phases)


def _queues(order: tuple[Action, ...]) -> tuple[deque[_Next], deque[_Next]]:
    """Return a rank's forwards, and its backwards."""
    forwards: deque[_Next] = deque()
    backwards: deque[_Next] = deque()
    before = None
    for action in order:
        if action.op is Op.F:
            forwards.append((action, before))
            before = action
        else:
            backwards.append((action, before))
    return forwards, backwards


def _is_ready(
    schedule: Schedule,
    action: Action,
    before: Action | None,
    ticks: dict[Action, int],
    tick: int,
) -> bool:
    """True if the action may run in this tick.

    Its inputs are of earlier ticks, or its stage's own forward of this tick, and the
    forward before it in the rank's order is done.
    """
    if before is not None and before not in ticks:
        return False
    for source in schedule.inputs(action):
        own_forward = source.op is Op.F and source.stage == action.stage
        if source not in ticks or ticks[source] >= tick + own_forward:
            return False
    return True


def lock_step_timeline(schedule: Schedule, times: StageTimes) -> Timeline:
    """Return the timeline of ranks that move together, as the training step's do.

    A tick takes the slowest stage's F, then its B. Ranks without work compute on zeros,
    which counts as idle here. Hops take no time.

    Raises:
        ScheduleError: The schedule is wrong.

    Example:
        >>> from meshpar.schedules import make_schedule
        >>> schedule = make_schedule("1f1b", 2, 3)
        >>> lock_step_timeline(schedule, StageTimes.uniform(2)).end_s
        12
    """
    ticks = lock_step_ticks(schedule)

    def tick_half(action: Action) -> tuple[int, bool]:
        return ticks[action], action.op is not Op.F

    forward_s, backward_s = times.slowest_s(schedule)
    start_s: dict[tuple[int, bool], float] = {}
    now_s: float = 0
    for half in sorted(set(map(tick_half, ticks))):
        start_s[half] = now_s
        _, is_backward = half
        now_s += backward_s if is_backward else forward_s

    def event(action: Action) -> Event:
        start = start_s[tick_half(action)]
        return Event(action, start, start + times.action_s(action))

    orders = (sorted(order, key=tick_half) for order in schedule.orders)
    return Timeline(schedule, tuple(tuple(map(event, order)) for order in orders))
