"""Time of all microbatches of a step through the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshpar.layout import Layout
from meshpar.schedules import (
    StageTimes,
    make_schedule,
    peak_in_flight,
    simulate,
    tick_table,
)

# Above so many actions a step is not replayed: what fill and drain cost is then taken
# from the closed form. (A replay takes about 4 microseconds an action.)
_MOST_ACTIONS = 4000


@dataclass(frozen=True)
class LockStep:
    """Ticks of a schedule when all ranks move together, and what each rank holds.

    Args:
        forward_ticks, backward_ticks: Ticks in which any rank does one.
        in_flight: Microbatches times chunks that each rank holds.
        head_ticks: Forward ticks whose head is not compiled away.
        down_hops: Backward ticks whose hop is not compiled away.
    """

    forward_ticks: int
    backward_ticks: int
    in_flight: tuple[int, ...]
    head_ticks: int
    down_hops: int


def span_s(
    layout: Layout, forward_s: Sequence[float], backward_s: Sequence[float]
) -> float:
    """From the first forward to the last backward; ranks wait for their inputs only.

    Args:
        layout: Stages, microbatches, schedule and chunks.
        forward_s: Of every stage, chunk by chunk.
        backward_s: The same.
    """
    ranks, count, chunks = layout.stage, layout.microbatches, layout.chunks
    rank_s = _of_ranks(ranks, forward_s, backward_s)
    if ranks == 1:
        return count * rank_s[0]
    replayed = _replayed(count, ranks)
    if 2 * replayed * ranks * chunks > _MOST_ACTIONS:
        return closed_form_s(layout, forward_s, backward_s)
    schedule = make_schedule(layout.schedule, ranks, replayed, chunks)
    times = StageTimes(
        forward_s=tuple(forward_s),
        input_grad_s=tuple(backward_s),
        weight_grad_s=(0.0,) * len(forward_s),
    )
    # Once full, the slowest rank never waits: each further microbatch takes its time.
    return simulate(schedule, times).end_s + (count - replayed) * max(rank_s)


def closed_form_s(
    layout: Layout, forward_s: Sequence[float], backward_s: Sequence[float]
) -> float:
    """`span_s` for stages of nearly equal time.

        span = microbatches * slowest rank + (all ranks - slowest rank) / chunks

    Exact for 1F1B and GPipe of equal stages (Narayanan et al. 2021, section 2.2).
    """
    rank_s = _of_ranks(layout.stage, forward_s, backward_s)
    fill_s = (sum(rank_s) - max(rank_s)) / layout.chunks
    return layout.microbatches * max(rank_s) + fill_s


def _of_ranks(
    ranks: int, forward_s: Sequence[float], backward_s: Sequence[float]
) -> list[float]:
    """Each rank's time of one microbatch, through all its chunks."""
    return [
        sum(forward_s[rank::ranks]) + sum(backward_s[rank::ranks])
        for rank in range(ranks)
    ]


def all_ticks_s(
    layout: Layout, forward_s: Sequence[float], backward_s: Sequence[float]
) -> float:
    """The same where all ranks run the same instructions in every tick."""
    if layout.stage == 1:
        return layout.microbatches * (sum(forward_s) + sum(backward_s))
    steps = lock_step(layout.schedule, layout.stage, layout.microbatches, layout.chunks)
    forward = steps.forward_ticks * max(forward_s)
    return forward + steps.backward_ticks * max(backward_s)


def lock_step(name: str, ranks: int, microbatches: int, chunks: int) -> LockStep:
    """Ticks and in-flight counts of a schedule in lock step."""
    replayed = _replayed(microbatches, ranks)
    large = 2 * replayed * ranks * chunks > _MOST_ACTIONS
    if large and (steps := closed_form_lock_step(name, ranks, microbatches, chunks)):
        return steps
    steps = _lock_step(name, ranks, replayed, chunks)
    more = microbatches - replayed
    in_flight = steps.in_flight
    if name in _HOLDS_ALL and more:
        in_flight = tuple(held + more * chunks for held in in_flight)
    more = (microbatches - replayed) * chunks
    return LockStep(
        steps.forward_ticks + more,
        steps.backward_ticks + more,
        in_flight,
        steps.head_ticks + more,
        steps.down_hops + more,
    )


def closed_form_lock_step(
    name: str, ranks: int, microbatches: int, chunks: int
) -> LockStep | None:
    """`lock_step` of many ranks; None where groups of microbatches are not full.

    With m microbatches, p ranks and v chunks, v m + p - 1 ticks fill and drain once.
    Rank r holds what comes and goes until its first backward: 2 (p - r) - 1 of 1F1B,
    and (v - 1) p more where its other chunks come first (Narayanan et al. 2021, 2.2).
    """
    if ranks < 3 or microbatches < ranks:
        return None
    if chunks > 1 and microbatches % ranks:
        return None
    ticks, every = chunks * microbatches + ranks - 1, chunks * microbatches
    if name in _HOLDS_ALL:
        held = (every,) * ranks
    else:
        first = (chunks - 1) * ranks - 1
        held = tuple(min(every, 2 * (ranks - rank) + first) for rank in range(ranks))
    return LockStep(ticks, ticks, held, ticks, ticks)


def in_flight(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """Microbatches times chunks that each rank holds when it waits for inputs only."""
    replayed = _replayed(microbatches, ranks)
    held = _in_flight(name, ranks, replayed, chunks)
    more = microbatches - replayed if name in _HOLDS_ALL else 0
    return tuple(count + more * chunks for count in held)


_HOLDS_ALL = ("gpipe", "looped_bfs")
"""Schedules that finish every forward before the first backward."""


def _replayed(microbatches: int, ranks: int) -> int:
    """As many microbatches as fill and drain the pipeline, in the same groups."""
    few = 3 * ranks + microbatches % ranks
    return min(microbatches, few)


@lru_cache(maxsize=4096)
def _lock_step(name: str, ranks: int, microbatches: int, chunks: int) -> LockStep:
    table = tick_table(make_schedule(name, ranks, microbatches, chunks))
    first, last = table.phases[0], table.phases[-1]
    # XLA unrolls a phase of one tick, and finds there that no microbatch ends in the
    # first, and that nothing reads what the last sends down.
    headless = first.stop - first.start == 1 and not first.has_backward and ranks > 1
    unread = last.stop - last.start == 1 and not last.has_forward
    return LockStep(
        table.num_forward_ticks,
        table.num_backward_ticks,
        table.peak_in_flight,
        table.num_forward_ticks - headless,
        table.num_backward_ticks - unread,
    )


@lru_cache(maxsize=4096)
def _in_flight(
    name: str, ranks: int, microbatches: int, chunks: int
) -> tuple[int, ...]:
    return peak_in_flight(make_schedule(name, ranks, microbatches, chunks))
