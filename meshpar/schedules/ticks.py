"""The tick of every action, where ranks move in lock step or diverge, and its cost."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
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
    has_weight_grad: bool = False


def lock_step_ticks(schedule: Schedule, *, paired: bool = False) -> dict[Action, int]:
    """Return the tick of every action in lock step, in which all ranks move together.

    In a tick a rank does at most one forward, then at most one backward (B or I), then
    at most one W. What another rank computed arrives one tick later; on its own rank a
    backward may read the forward of the same tick, and a W its I. A rank keeps the
    order of its forwards, of its backwards and of its W. A backward waits for all that
    precedes it; a forward does not wait for a backward, or a tick's forward half would
    idle. So all ranks finish in the fewest ticks, and 1F1B has up to 2 (S-r) - 1
    microbatches in flight on rank r of S, not its asynchronous S-r.

    As all ranks pay for a tick with a W, they do theirs together: when each rank that
    has any left can do one, when nothing else is left, or when on some rank as many
    wait as may (`Schedule.max_pending_w`).

    Args:
        schedule: The order of every rank's work.
        paired: True if the forward and the backward of a tick run side by side: a
            backward reads no forward of the same tick, and one more is in flight.

    Raises:
        ScheduleError: The schedule is wrong.

    Example:
        >>> orders = [[Action.parse("0F0"), Action.parse("0B0")]]
        >>> [*lock_step_ticks(Schedule(orders, 1, 1)).values()]
        [0, 0]
    """
    check_schedule(schedule)
    queues = [queue for order in schedule.orders for queue in _queues(order)]
    weight_grads = [
        deque(action for action in order if action.op is Op.W)
        for order in schedule.orders
    ]
    most = schedule.max_pending_w
    ticks: dict[Action, int] = {}
    tick = 0
    while any(queues) or any(weight_grads):
        for queue in queues:
            if queue and _is_ready(schedule, *queue[0], ticks, tick, paired):
                action, _ = queue.popleft()
                ticks[action] = tick
        left = [queue for queue in weight_grads if queue]
        ready = [queue for queue in left if schedule.inputs(queue[0])[0] in ticks]
        full = most and any(_num_waiting(queue, ticks) == most for queue in ready)
        if len(ready) == len(left) or not any(queues) or full:
            ticks.update((queue.popleft(), tick) for queue in ready)
        tick += 1
    return ticks


def divergent_ticks(schedule: Schedule) -> dict[Action, int]:
    """Return the tick of every action where each rank does its own: one in a tick.

    What an action reads is of an earlier tick. A rank keeps its order.

    Raises:
        ScheduleError: The schedule is wrong.

    Example:
        >>> from meshpar.schedules import make_schedule
        >>> max(divergent_ticks(make_schedule("zero_bubble_h2", 4, 8)).values())
        26
    """
    check_schedule(schedule)
    queues = [deque(order) for order in schedule.orders]
    ticks: dict[Action, int] = {}
    tick = 0
    while any(queues):
        ready = [
            queue.popleft()
            for queue in queues
            if queue and all(source in ticks for source in schedule.inputs(queue[0]))
        ]
        ticks.update((action, tick) for action in ready)
        tick += 1
    return ticks


def tick_phases(
    ticks: dict[Action, int], *, divergent: bool = False
) -> tuple[Phase, ...]:
    """Return the longest runs of ticks in which the ranks do the same kinds of work.

    Each phase is compiled by itself, and XLA holds copies of the gradients between
    them: ten phases of `zero_bubble_v` (4 stages of llama3-8b's layers, 16 in all) had
    25.7 GB of temporaries compiled for 8 H100, three had 10.0 GB. So where ranks
    diverge, or where there would be more than `_MOST_PHASES`, backwards count as
    present from their first tick on, and forwards until their last.
    """
    if divergent:
        return _phases(ticks, coarse=True)
    phases = _phases(ticks, coarse=False)
    return phases if len(phases) <= _MOST_PHASES else _phases(ticks, coarse=True)


_MOST_PHASES = 6


def cut_phases(phases: Sequence[Phase], tick: int) -> tuple[Phase, ...]:
    """Return the phases, the one that a tick is in cut before it."""
    parts = (
        (phase._replace(stop=tick), phase._replace(start=tick))
        if phase.start < tick < phase.stop
        else (phase,)
        for phase in phases
    )
    return tuple(itertools.chain.from_iterable(parts))


def _phases(ticks: dict[Action, int], *, coarse: bool) -> tuple[Phase, ...]:
    forward, backward, weight_grad = (
        {tick for action, tick in ticks.items() if action.op in ops}
        for ops in ((Op.F,), (Op.B, Op.I), (Op.W,))
    )
    if coarse:
        forward = {*range(max(forward) + 1)}
        backward = {*range(min(backward), max(ticks.values()) + 1)}
        weight_grad = backward if weight_grad else set()
    phases: list[Phase] = []
    for tick in range(max(ticks.values()) + 1):
        kinds = tick in forward, tick in backward
        phase = Phase(*kinds, tick, tick + 1, tick in weight_grad)
        before = phases[-1] if phases else None
        if before and before._replace(start=tick, stop=tick + 1) == phase:
            phases[-1] = before._replace(stop=tick + 1)
        else:
            phases.append(phase)
    return tuple(phases)


def _num_waiting(weight_grads: deque[Action], ticks: dict[Action, int]) -> int:
    """Count the weight gradients of a rank whose input gradient is done."""
    return sum(action._replace(op=Op.I) in ticks for action in weight_grads)


def _queues(order: tuple[Action, ...]) -> tuple[deque[_Next], deque[_Next]]:
    """Return a rank's forwards, and its backwards but W."""
    forwards: deque[_Next] = deque()
    backwards: deque[_Next] = deque()
    before = None
    for action in order:
        if action.op is Op.F:
            forwards.append((action, before))
            before = action
        elif action.op is not Op.W:
            backwards.append((action, before))
    return forwards, backwards


def _is_ready(
    schedule: Schedule,
    action: Action,
    before: Action | None,
    ticks: dict[Action, int],
    tick: int,
    paired: bool,
) -> bool:
    """True if the action may run in this tick.

    Its inputs are of earlier ticks, or unless `paired` its stage's own forward of this
    tick, and the forward before it in the rank's order is done.
    """
    if before is not None and before not in ticks:
        return False
    for source in schedule.inputs(action):
        own_forward = source.op is Op.F and source.stage == action.stage
        last = tick if own_forward and not paired else tick - 1
        if source not in ticks or ticks[source] > last:
            return False
    return True


def ticks_timeline(
    schedule: Schedule, times: StageTimes, *, divergent: bool = False
) -> Timeline:
    """Return the timeline of ranks that move tick by tick, as the training step's do.

    In lock step a tick takes the slowest stage's F, then its B or I, then its W. Ranks
    without work compute on zeros, which counts as idle here. Where ranks diverge, a
    tick takes its longest action. Hops take no time.

    Raises:
        ScheduleError: The schedule is wrong.

    Example:
        >>> from meshpar.schedules import make_schedule
        >>> schedule = make_schedule("1f1b", 2, 3)
        >>> ticks_timeline(schedule, StageTimes.uniform(2)).end_s
        12
    """
    check_schedule(schedule)
    if schedule.splits_backward:
        schedule = schedule.with_split_backwards()
    ticks = (divergent_ticks if divergent else lock_step_ticks)(schedule)

    def part(action: Action) -> tuple[int, int]:
        return ticks[action], 0 if divergent else _PARTS[action.op]

    seconds = {action: times.action_s(action) for action in schedule.actions}
    if not divergent:
        slowest_s = {
            op: max(s for action, s in seconds.items() if action.op is op)
            for op in {action.op for action in seconds}
        }
        seconds = {action: slowest_s[action.op] for action in seconds}
    part_s: dict[tuple[int, int], float] = {}
    for action, action_s in seconds.items():
        part_s[part(action)] = max(part_s.get(part(action), 0), action_s)
    start_s: dict[tuple[int, int], float] = {}
    now_s: float = 0
    for key in sorted(part_s):
        start_s[key] = now_s
        now_s += part_s[key]

    def event(action: Action) -> Event:
        start = start_s[part(action)]
        return Event(action, start, start + times.action_s(action))

    orders = (sorted(order, key=part) for order in schedule.orders)
    return Timeline(schedule, tuple(tuple(map(event, order)) for order in orders))


_PARTS = {Op.F: 0, Op.B: 1, Op.I: 1, Op.W: 2}
"""Part of a tick in lock step."""
