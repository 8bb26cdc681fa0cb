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

from dataclasses import dataclass
from typing import NamedTuple

from meshpar.schedules.base import Action, Op, Schedule
from meshpar.schedules.check import check_schedule


class Phase(NamedTuple):
    """A run of ticks, `start` to before `stop`, in which ranks do the same kinds."""

    has_forward: bool
    has_backward: bool
    start: int
    stop: int


@dataclass
class _Rank:
    """How far a rank is.

    Args:
        forwards: In order.
        backwards: In order, each with the number of forwards before it.
        num_forwards: Forwards done.
        num_backwards: Backwards done.
    """

    forwards: list[Action]
    backwards: list[tuple[Action, int]]
    num_forwards: int = 0
    num_backwards: int = 0

    def next_forward(self) -> Action | None:
        """The next one, if any is left."""
        if self.num_forwards == len(self.forwards):
            return None
        return self.forwards[self.num_forwards]

    def next_backward(self) -> Action | None:
        """The next one, if the forwards before it are done."""
        if self.num_backwards == len(self.backwards):
            return None
        action, num_before = self.backwards[self.num_backwards]
        return action if num_before <= self.num_forwards else None


def lock_step_ticks(schedule: Schedule) -> dict[Action, int]:
    """The tick of every action.

    Raises:
        ScheduleError: The schedule is wrong.

    Example:
        >>> orders = [[Action.parse("0F0"), Action.parse("0B0")]]
        >>> [*lock_step_ticks(Schedule(orders, 1, 1)).values()]
        [0, 0]
    """
    check_schedule(schedule)
    ranks = [_rank_of(order) for order in schedule.orders]
    ticks: dict[Action, int] = {}
    tick = 0
    while len(ticks) < len(schedule.actions):
        for rank in ranks:
            forward = rank.next_forward()
            if forward and _is_ready(schedule, forward, ticks, tick):
                ticks[forward] = tick
                rank.num_forwards += 1
            backward = rank.next_backward()
            if backward and _is_ready(schedule, backward, ticks, tick):
                ticks[backward] = tick
                rank.num_backwards += 1
        tick += 1
    return ticks


def phases_of(ticks: dict[Action, int]) -> tuple[Phase, ...]:
    """The longest runs of ticks in which any rank does the same kinds of action."""
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


def _rank_of(order: tuple[Action, ...]) -> _Rank:
    rank = _Rank(forwards=[], backwards=[])
    for action in order:
        if action.op is Op.F:
            rank.forwards.append(action)
        else:
            rank.backwards.append((action, len(rank.forwards)))
    return rank


def _is_ready(
    schedule: Schedule, action: Action, ticks: dict[Action, int], tick: int
) -> bool:
    """Whether the inputs are of earlier ticks, or the stage's own forward of this."""
    for source in schedule.inputs(action):
        own_forward = source.op is Op.F and source.stage == action.stage
        if source not in ticks or ticks[source] >= tick + own_forward:
            return False
    return True
