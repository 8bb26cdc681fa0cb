"""Time of all microbatches of a step through the pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from meshpar.layout import Layout
from meshpar.schedules import (
    SCHEDULES,
    ClosedForms,
    Schedule,
    StageTimes,
    TickTable,
    make_schedule,
    peak_in_flight,
    simulate,
    tick_table,
)

# Above so many actions a step is not replayed: what fill and drain cost is then taken
# from a closed form, where one is known. (A replay takes 4 microseconds an action.)
_MOST_ACTIONS = 4000

Kinds = tuple[bool, bool, bool]
"""True for each of a forward, a backward and a weight gradient that any rank does."""


@dataclass(frozen=True)
class Ticks:
    """Ticks of a schedule, and what each rank holds.

    Args:
        forward_ticks, backward_ticks: Ticks with the program of one, whole or for the
            input.
        in_flight: Microbatches times chunks that each rank holds.
        head_ticks: Forward ticks with a head: not while the pipeline fills.
        down_hops: Backward ticks before which a gradient hops: not the very first.
        weight_grad_ticks: Ticks with the program of a weight gradient.
        stash: Most weight gradients that wait on a rank, of a chunk each.
        arrived: Activations and gradients that wait on a rank for their ticks.
        kinds: Number of ticks by what ranks do in them, if they diverge.
    """

    forward_ticks: int = 0
    backward_ticks: int = 0
    in_flight: tuple[int, ...] = ()
    head_ticks: int = 0
    down_hops: int = 0
    weight_grad_ticks: int = 0
    stash: int = 0
    arrived: int = 2
    kinds: Mapping[Kinds, int] = field(default_factory=dict)

    def extended(self, by_one: Ticks, count: int) -> Ticks:
        """Return the ticks with `count` more microbatches; `by_one` has one more."""

        def longer(name: str) -> Any:
            own = getattr(self, name)
            return own + count * (getattr(by_one, name) - own)

        kinds = {
            kind: self.kinds.get(kind, 0) + count * (number - self.kinds.get(kind, 0))
            for kind, number in by_one.kinds.items()
        }
        return replace(by_one, kinds=kinds, **{name: longer(name) for name in _COUNTS})


_COUNTS = (
    "forward_ticks",
    "backward_ticks",
    "head_ticks",
    "down_hops",
    "weight_grad_ticks",
)


def span_s(
    layout: Layout,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_grad_s: Sequence[float] = (),
) -> float:
    """Return the seconds from the first forward to the last backward.

    Ranks wait for their inputs only.

    Args:
        layout: Stages, microbatches, schedule and chunks.
        forward_s: Seconds of every stage's forward, chunk by chunk.
        backward_s: Seconds of every stage's backward, or of its input gradient.
        weight_grad_s: Seconds of every stage's weight gradient, if they are split.
    """
    ranks, count, chunks = layout.stage, layout.microbatches, layout.chunks
    weight_grad_s = weight_grad_s or (0.0,) * len(forward_s)
    whole_s = [sum(both) for both in zip(backward_s, weight_grad_s, strict=True)]
    rank_s = _rank_s(layout, forward_s, whole_s)
    if ranks == 1:
        return count * rank_s[0]
    replayed = _replayed(layout.schedule, ranks, count)
    large = 2 * replayed * ranks * chunks > _MOST_ACTIONS
    if large and SCHEDULES[layout.schedule].closed_forms:
        return closed_form_s(layout, forward_s, whole_s)
    limit = layout.max_pending_w
    schedule = make_schedule(
        layout.schedule, ranks, replayed, chunks, max_pending_w=limit
    )
    times = StageTimes(
        forward_s=tuple(forward_s),
        input_grad_s=tuple(backward_s),
        weight_grad_s=tuple(weight_grad_s),
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
    layout: Layout,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_grad_s: Sequence[float] = (),
) -> float:
    """Return `span_s` where all ranks run the same instructions in every tick."""
    if layout.stage == 1:
        return layout.microbatches * (sum(forward_s) + sum(backward_s))
    steps = layout_ticks(layout)
    seconds = steps.forward_ticks * max(forward_s)
    seconds += steps.backward_ticks * max(backward_s)
    return seconds + steps.weight_grad_ticks * max(weight_grad_s, default=0.0)


def divergent_s(
    layout: Layout,
    forward_s: Sequence[float],
    input_grad_s: Sequence[float],
    weight_grad_s: Sequence[float],
) -> float:
    """Return the seconds of the actions of ranks that each do their own in a tick.

    A tick takes the longest of its actions, of the slowest stage.
    """
    action_s = [max(forward_s), max(input_grad_s), max(weight_grad_s)]
    return sum(
        count * max(s for s, is_done in zip(action_s, kinds, strict=True) if is_done)
        for kinds, count in layout_ticks(layout).kinds.items()
    )


def layout_ticks(layout: Layout) -> Ticks:
    """Return the ticks of a layout with stages, in its execution."""
    sizes = layout.schedule, layout.stage, layout.microbatches, layout.chunks
    if not (SCHEDULES[layout.schedule].splits_backward or layout.divergent):
        return lock_step(*sizes)
    return _extended_ticks(*sizes, layout.max_pending_w, layout.divergent)


@lru_cache(maxsize=4096)
def _extended_ticks(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    max_pending_w: int,
    divergent: bool,
) -> Ticks:
    """Return ticks of few microbatches, extended by those of a further one.

    Three for each rank fill the pipeline; each further one then adds as many ticks as
    the next, and a rank holds no more. `auto` finds another order for every number of
    microbatches: its ticks are counted whole.
    """
    few = 3 * ranks + 1
    options = chunks, max_pending_w, divergent
    method = SCHEDULES[name]
    repeats = method.no_better_than is None
    if method.closed_forms or microbatches <= few or not repeats:
        return _ticks(name, ranks, microbatches, *options)
    less = _ticks(name, ranks, few - 1, *options)
    return less.extended(_ticks(name, ranks, few, *options), microbatches - few + 1)


def lock_step(name: str, ranks: int, microbatches: int, chunks: int) -> Ticks:
    """Return ticks and in-flight counts of a schedule in lock step."""
    if SCHEDULES[name].splits_backward:
        return _extended_ticks(name, ranks, microbatches, chunks, 0, False)
    if steps := closed_form_lock_step(name, ranks, microbatches, chunks):
        return steps
    replayed = _replayed(name, ranks, microbatches)
    steps = _ticks(name, ranks, replayed, chunks)
    if replayed == microbatches:
        return steps
    forms = _closed_forms(name)
    all_of_them, some = (ranks, microbatches, chunks), (ranks, replayed, chunks)
    more = forms.length(*all_of_them) - forms.length(*some)
    return Ticks(
        steps.forward_ticks + more,
        steps.backward_ticks + more,
        _scaled(steps.in_flight, forms.lock_step_in_flight, some, all_of_them),
        steps.head_ticks + more,
        steps.down_hops + more,
    )


def closed_form_lock_step(
    name: str, ranks: int, microbatches: int, chunks: int
) -> Ticks | None:
    """Return `lock_step` of three or more ranks, from the schedule's closed forms.

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
    few = _ticks(name, 3, 3, chunks)
    # Ticks that only fill, up to the first loss; or forwards until the last.
    headless = ranks * chunks - 1 if few.head_ticks < few.forward_ticks else 0
    unread = few.backward_ticks - few.down_hops
    return Ticks(ticks, ticks, in_flight, ticks - headless, ticks - unread)


@lru_cache(maxsize=4096)
def in_flight(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """Return the microbatches times chunks that each rank holds without lock step."""
    replayed = _replayed(name, ranks, microbatches)
    held = peak_in_flight(make_schedule(name, ranks, replayed, chunks))
    if replayed == microbatches or SCHEDULES[name].splits_backward:
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

    All of them where the schedule has no closed forms, but for split backwards.
    """
    if SCHEDULES[name].splits_backward:
        return min(microbatches, 3 * ranks)
    if SCHEDULES[name].closed_forms is None:
        return microbatches
    few = 3 * ranks + microbatches % ranks
    return min(microbatches, few)


def _closed_forms(name: str) -> ClosedForms:
    forms = SCHEDULES[name].closed_forms
    assert forms is not None, name
    return forms


@lru_cache(maxsize=4096)
def _ticks(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    max_pending_w: int = 0,
    divergent: bool = False,
) -> Ticks:
    schedule = make_schedule(
        name, ranks, microbatches, chunks, max_pending_w=max_pending_w
    )
    return schedule_ticks(schedule, divergent=divergent)


def schedule_ticks(schedule: Schedule, *, divergent: bool) -> Ticks:
    """Return the ticks of any schedule, and what each rank holds."""
    table = tick_table(schedule, divergent=divergent)
    at_last = table.forward_stage == schedule.num_stages - 1
    arrivals, headless, unread = table.gradient_arrival, 0, 0
    for phase in table.phases:
        ticks = slice(phase.start, phase.stop)
        if phase.has_forward and not at_last[ticks].any():
            headless += phase.stop - phase.start
        if (
            schedule.num_ranks > 1
            and phase.has_backward
            and (arrivals[ticks] < 0).all()
        ):
            unread += phase.stop - phase.start
    splits = schedule.splits_backward
    return Ticks(
        table.num_forward_ticks,
        table.num_backward_ticks,
        table.peak_in_flight,
        table.num_forward_ticks - headless,
        table.num_backward_ticks - unread,
        weight_grad_ticks=table.num_weight_grad_ticks,
        stash=max(table.stash_slots),
        arrived=max(table.input_slots) + max(table.gradient_slots) if splits else 2,
        kinds=_kinds(table) if divergent else {},
    )


def _kinds(table: TickTable) -> Counter[Kinds]:
    """Count the ticks by what any rank does in them."""
    done = zip(
        *(
            (stages >= 0).any(axis=1).tolist()
            for stages in (
                table.forward_stage,
                table.backward_stage,
                table.weight_grad_stage,
            )
        ),
        strict=True,
    )
    return Counter(done)
