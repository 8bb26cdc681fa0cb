"""Pipeline schedules as plain data: make one, check it, replay it, lay it into ticks.

Without jax. A schedule of one's own is a list of orders (`schedule_of`) or a file
(`read_csv`); a new one of ours is a file here, with all that holds of it, and a line
in `SCHEDULES`: layouts, planner, commands and tests ask that table.
"""

from __future__ import annotations

from meshpar.errors import InputError, nearest
from meshpar.schedules.base import Action, Op, Schedule, require_counts
from meshpar.schedules.check import (
    ScheduleError,
    check_schedule,
    check_size,
    peak_in_flight,
    problems,
)
from meshpar.schedules.closed_forms import ClosedForms
from meshpar.schedules.gpipe import gpipe
from meshpar.schedules.interleaved_1f1b import interleaved_1f1b, zero_bubble_paper_hop
from meshpar.schedules.looped_bfs import looped_bfs
from meshpar.schedules.method import ScheduleMethod
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

SCHEDULES: dict[str, ScheduleMethod] = {
    method.name: method
    for method in (
        one_f_one_b,
        gpipe,
        interleaved_1f1b,
        looped_bfs,
    )
}
"""Name -> schedule: all that a layout can name."""

__all__ = [
    "Action",
    "ClosedForms",
    "Event",
    "Op",
    "Phase",
    "SCHEDULES",
    "Schedule",
    "ScheduleError",
    "ScheduleMethod",
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
    "method_of",
    "one_f_one_b",
    "peak_in_flight",
    "problems",
    "read_csv",
    "schedule_of",
    "simulate",
    "size_refusals",
    "step_refusal",
    "tick_table",
    "to_csv",
    "zero_bubble_paper_hop",
]


def make_schedule(
    name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None
) -> Schedule:
    """The schedule of that name.

    Args:
        name: One of `SCHEDULES`.
        num_ranks: Size of the `stage` mesh axis.
        num_microbatches: Microbatches of one step.
        chunks: Stages of one rank; when left out the schedule's own number, or 1.

    Raises:
        InputError: No such schedule, or sizes that it cannot have.

    Example:
        >>> schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=2)
        >>> print(to_csv(schedule), end="")
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
    """
    chunks = method_of(name).default_chunks if chunks is None else chunks
    require_counts(stages=num_ranks, microbatches=num_microbatches, chunks=chunks)
    sizes = num_ranks, num_microbatches, chunks
    for refusal in size_refusals(name, *sizes).values():
        raise refusal
    return SCHEDULES[name](*sizes)


def size_refusals(
    name: str, num_ranks: int, num_microbatches: int, chunks: int
) -> dict[str, InputError]:
    """Key of a layout -> why that schedule does not exist for the size it gives.

    Raises:
        InputError: No such schedule.
    """
    refusals = method_of(name).refusals(num_ranks, num_microbatches, chunks)
    others = [other for other in SCHEDULES if SCHEDULES[other].has_chunks(chunks)]
    if "chunks" in refusals and others:
        refused = refusals["chunks"]
        refusals["chunks"] = InputError(
            f"{refused}, or choose {' or '.join(others)}", key=refused.key
        )
    return refusals


def step_refusal(name: str) -> InputError | None:
    """Return the error of a schedule that no training step runs; None if one does.

    Raises:
        InputError: No such schedule.
    """
    if not method_of(name).splits_backward:
        return None
    whole = [other for other in SCHEDULES if not SCHEDULES[other].splits_backward]
    return InputError(
        f"schedule={name} splits backwards into I and W, but every rank runs whole "
        f"backwards in lock step; choose {' or '.join(whole)}",
        key="schedule.split_backward",
    )


def method_of(name: str) -> ScheduleMethod:
    """The schedule of that name, whatever its sizes.

    Raises:
        InputError: There is none; the nearest names are in the message.
    """
    if not isinstance(name, str) or name not in SCHEDULES:
        raise InputError(
            f"no schedule {name!r}; {nearest(str(name), SCHEDULES)}",
            key="schedule.unknown_name",
        )
    return SCHEDULES[name]
