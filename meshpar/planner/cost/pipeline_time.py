"""Time of all microbatches of a step through the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshpar.layout import Layout
from meshpar.schedules import (
    SCHEDULES,
    ClosedForms,
    StageTimes,
    make_schedule,
    peak_in_flight,
    simulate,
    tick_table,
)

# Above so many actions a step is not replayed: what fill and drain cost is then taken
# from a closed form, where one is known. (A replay takes 4 microseconds an action.)
_MOST_ACTIONS = 4000


@dataclass(frozen=True)
class LockStep:
    """Ticks of a schedule when all ranks move together, and what each rank holds.

    Args:
        forward_ticks, backward_ticks: Ticks in which any rank does one.
        in_flight: Microbatches times chunks that each rank holds.
        head_ticks: Forward ticks with a head: not while the pipeline fills.
        down_hops: Backward ticks before which a gradient hops: not the very first.
    """

    forward_ticks: int
    backward_ticks: int
    in_flight: tuple[int, ...]
    head_ticks: int
    down_hops: int


def span_s(
    layout: Layout, forward_s: Sequence[float], backward_s: Sequence[float]
) -> float:
    """Return the seconds from the first forward to the last backward.

    Ranks wait for their inputs only.

    Args:
        layout: Stages, microbatches, schedule and chunks.
        forward_s: Seconds of every stage's forward, chunk by chunk.
        backward_s: Seconds of every stage's backward.
    """
    ranks, count, chunks = layout.stage, layout.microbatches, layout.chunks
    rank_s = _rank_s(layout, forward_s, backward_s)
    if ranks == 1:
        return count * rank_s[0]
    replayed = _replayed(layout.schedule, ranks, count)
    large = 2 * replayed * ranks * chunks > _MOST_ACTIONS
    if large and SCHEDULES[layout.schedule].closed_forms:
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
    """Return `span_s` for stages of nearly equal time, by a formula.

        span = microbatches * slowest rank + idle * mean of the others / chunks

    with the idle time of a rank in chunks: one for every other rank where the pipeline
    fills and drains once. Exact for 1F1B and GPipe of equal stages (Narayanan
    et al. 2021, section 2.2).
    """
    ranks, count, chunks = layout.stage, layout.microbatches, layout.chunks
    rank_s = _rank_s(layout, forward_s, backward_s)
    length = _closed_forms(layout.schedule).length(ranks, count, chunks)
    idle_per_other = (length - count * chunks) / (ranks - 1)
    fill_s = idle_per_other * (sum(rank_s) - max(rank_s)) / chunks
    return count * max(rank_s) + fill_s


def all_ticks_s(
    layout: Layout, forward_s: Sequence[float], backward_s: Sequence[float]
) -> float:
    """Return `span_s` where all ranks run the same instructions in every tick."""
    if layout.stage == 1:
        return layout.microbatches * (sum(forward_s) + sum(backward_s))
    steps = lock_step(layout.schedule, layout.stage, layout.microbatches, layout.chunks)
    forward = steps.forward_ticks * max(forward_s)
    return forward + steps.backward_ticks * max(backward_s)


def lock_step(name: str, ranks: int, microbatches: int, chunks: int) -> LockStep:
    """Return ticks and in-flight counts of a schedule in lock step."""
    replayed = _replayed(name, ranks, microbatches)
    large = 2 * replayed * ranks * chunks > _MOST_ACTIONS
    if large and (steps := closed_form_lock_step(name, ranks, microbatches, chunks)):
        return steps
    steps = _lock_step(name, ranks, replayed, chunks)
    if replayed == microbatches:
        return steps
    forms = _closed_forms(name)
    all_of_them, some = (ranks, microbatches, chunks), (ranks, replayed, chunks)
    more = forms.length(*all_of_them) - forms.length(*some)
    return LockStep(
        steps.forward_ticks + more,
        steps.backward_ticks + more,
        _scaled(steps.in_flight, forms.lock_step_in_flight, some, all_of_them),
        steps.head_ticks + more,
        steps.down_hops + more,
    )


def closed_form_lock_step(
    name: str, ranks: int, microbatches: int, chunks: int
) -> LockStep | None:
    """Return `lock_step` of many ranks, from the schedule's closed forms.

    None if it has none, or groups of microbatches are not full.
    """
    forms = SCHEDULES[name].closed_forms
    if forms is None or ranks < 3 or microbatches < ranks:
        return None
    if chunks > 1 and microbatches % ranks:
        return None
    sizes = ranks, microbatches, chunks
    ticks = forms.length(*sizes)
    in_flight = forms.lock_step_in_flight(*sizes)
    few = _lock_step(name, 3, 3, chunks)
    # Ticks that only fill, up to the first loss; or forwards until the last.
    headless = ranks * chunks - 1 if few.head_ticks < few.forward_ticks else 0
    unread = few.backward_ticks - few.down_hops
    return LockStep(ticks, ticks, in_flight, ticks - headless, ticks - unread)


@lru_cache(maxsize=4096)
def in_flight(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """Return the microbatches times chunks that each rank holds without lock step."""
    replayed = _replayed(name, ranks, microbatches)
    held = peak_in_flight(make_schedule(name, ranks, replayed, chunks))
    if replayed == microbatches:
        return held
    all_of_them, some = (ranks, microbatches, chunks), (ranks, replayed, chunks)
    return _scaled(held, _closed_forms(name).in_flight, some, all_of_them)


def _rank_s(
    layout: Layout, forward_s: Sequence[float], backward_s: Sequence[float]
) -> list[float]:
    """Seconds of one microbatch through all chunks of each rank."""
    ranks, stages_of = layout.stage, SCHEDULES[layout.schedule].stages_of
    return [
        sum(forward_s[stage] for stage in stages_of(rank, ranks, layout.chunks))
        + sum(backward_s[stage] for stage in stages_of(rank, ranks, layout.chunks))
        for rank in range(ranks)
    ]


def _scaled(
    held: tuple[int, ...],
    closed_form: Callable[[int, int, int], tuple[int, ...]],
    some: tuple[int, int, int],
    all_of_them: tuple[int, int, int],
) -> tuple[int, ...]:
    """Extend counts held of some microbatches to all, by a closed form."""
    return tuple(
        count + more - less
        for count, more, less in zip(
            held, closed_form(*all_of_them), closed_form(*some), strict=True
        )
    )


def _replayed(name: str, ranks: int, microbatches: int) -> int:
    """Number of microbatches that fill and drain the pipeline, in the same groups.

    All of them where the schedule has no closed forms.
    """
    if SCHEDULES[name].closed_forms is None:
        return microbatches
    few = 3 * ranks + microbatches % ranks
    return min(microbatches, few)


def _closed_forms(name: str) -> ClosedForms:
    forms = SCHEDULES[name].closed_forms
    assert forms is not None, name
    return forms


@lru_cache(maxsize=4096)
def _lock_step(name: str, ranks: int, microbatches: int, chunks: int) -> LockStep:
    table = tick_table(make_schedule(name, ranks, microbatches, chunks))
    at_last = table.forward_stage == ranks * chunks - 1
    arrivals, headless, unread = table.gradient_arrival, 0, 0
    for phase in table.phases:
        ticks = slice(phase.start, phase.stop)
        if phase.has_forward and not at_last[ticks].any():
            headless += phase.stop - phase.start
        if ranks > 1 and phase.has_backward and (arrivals[ticks] < 0).all():
            unread += phase.stop - phase.start
    return LockStep(
        table.num_forward_ticks,
        table.num_backward_ticks,
        table.peak_in_flight,
        table.num_forward_ticks - headless,
        table.num_backward_ticks - unread,
    )
