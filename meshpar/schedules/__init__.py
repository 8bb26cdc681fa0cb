"""Pipeline schedules as plain data: make one, check it, replay it, lay it into ticks.

Without jax. A schedule of one's own is a list of orders (`schedule_of`) or a file
(`read_csv`); a new one of ours is a file here and a line in `SCHEDULES`.
"""

from __future__ import annotations

from collections.abc import Callable

from meshpar.errors import InputError
from meshpar.layout import nearest
from meshpar.schedules.base import Action, Op, Schedule, require_counts
from meshpar.schedules.check import (
    ScheduleError,
    check_schedule,
    check_size,
    peak_in_flight,
    problems,
)
from meshpar.schedules.gpipe import gpipe
from meshpar.schedules.interleaved_1f1b import interleaved_1f1b, zero_bubble_paper_hop
from meshpar.schedules.looped_bfs import looped_bfs
from meshpar.schedules.one_f_one_b import one_f_one_b
from meshpar.schedules.order_text import read_csv, schedule_of, to_csv
from meshpar.schedules.simulate import (
    Event,
    StageTimes,
    Timeline,
    idle_fraction,
    simulate,
)
from meshpar.schedules.tick_table import TickTable, lock_step_span_s, tick_table
from meshpar.schedules.ticks import Phase

ONE_CHUNK: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}
"""Schedules of one stage a rank, called with ranks and microbatches."""

CHUNKED: dict[str, Callable[[int, int, int], Schedule]] = {
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
}
"""Schedules of several, called with ranks, microbatches and chunks a rank."""

SCHEDULES = (*ONE_CHUNK, *CHUNKED)
"""The names that `make_schedule` knows."""

__all__ = [
    "Action",
    "Event",
    "Op",
    "Phase",
    "SCHEDULES",
    "Schedule",
    "ScheduleError",
    "StageTimes",
    "TickTable",
    "Timeline",
    "check_schedule",
    "check_size",
    "gpipe",
    "idle_fraction",
    "interleaved_1f1b",
    "lock_step_span_s",
    "looped_bfs",
    "make_schedule",
    "one_f_one_b",
    "peak_in_flight",
    "problems",
    "read_csv",
    "schedule_of",
    "simulate",
    "tick_table",
    "to_csv",
    "zero_bubble_paper_hop",
]


def make_schedule(
    name: str, num_ranks: int, num_microbatches: int, chunks: int = 1
) -> Schedule:
    """The schedule of that name.

    Args:
        name: One of `SCHEDULES`.
        num_ranks: Size of the `stage` mesh axis.
        num_microbatches: Microbatches of one step.
        chunks: Stages of one rank.

    Raises:
        InputError: No such schedule, or sizes that it cannot have.

    Example:
        >>> schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=2)
        >>> print(to_csv(schedule), end="")
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
    """
    require_counts(stages=num_ranks, microbatches=num_microbatches, chunks=chunks)
    if name in CHUNKED:
        return CHUNKED[name](num_ranks, num_microbatches, chunks)
    if name not in ONE_CHUNK:
        raise InputError(f"no schedule {name!r}; {nearest(name, SCHEDULES)}")
    if chunks != 1:
        raise InputError(
            f"chunks={chunks}: schedule {name!r} has one stage a rank; leave chunks "
            f"at 1, or choose {' or '.join(CHUNKED)}"
        )
    return ONE_CHUNK[name](num_ranks, num_microbatches)
