"""Pipeline schedules as plain data: make one, check it, replay it, lay it into ticks.

Without jax. A schedule of your own is a list of orders (`schedule_from_orders`) or a
file (`read_csv`); a new one of ours is a file here, with all that holds of it, and a
line in `SCHEDULES`: layouts, planner, commands and tests read that table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from meshpar.errors import InputError, nearest, renamed
from meshpar.schedules.auto import Limits, auto, search_schedule
from meshpar.schedules.base import (
    Action,
    Op,
    Schedule,
    nothing_pending,
    read_csv,
    require_counts,
    schedule_from_orders,
    to_csv,
)
from meshpar.schedules.building_blocks import v_half, v_min
from meshpar.schedules.check import (
    ScheduleError,
    check_schedule,
    check_size,
    peak_in_flight,
    problems,
)
from meshpar.schedules.dualpipe_v import dualpipe_v
from meshpar.schedules.gpipe import gpipe
from meshpar.schedules.interleaved_1f1b import interleaved_1f1b, zero_bubble_paper_hop
from meshpar.schedules.looped_bfs import looped_bfs
from meshpar.schedules.method import ClosedForms, ScheduleMethod
from meshpar.schedules.one_f_one_b import one_f_one_b
from meshpar.schedules.pipedream_stash import WeightVersions, pipedream_stash
from meshpar.schedules.simulate import (
    Event,
    StageTimes,
    Timeline,
    idle_fraction,
    simulate,
)
from meshpar.schedules.tick_table import TickTable, lock_step_span_s, tick_table
from meshpar.schedules.ticks import Phase
from meshpar.schedules.zero_bubble_h1 import zero_bubble_h1
from meshpar.schedules.zero_bubble_h2 import zero_bubble_h2
from meshpar.schedules.zero_bubble_v import zero_bubble_v

SCHEDULES: dict[str, ScheduleMethod] = {
    method.name: method
    for method in (
        one_f_one_b,
        gpipe,
        interleaved_1f1b,
        looped_bfs,
        zero_bubble_h1,
        zero_bubble_h2,
        zero_bubble_v,
        v_half,
        v_min,
        dualpipe_v,
        auto,
        pipedream_stash,
    )
}
"""Name -> schedule: all that a layout can name."""

OwnSchedule: TypeAlias = Schedule | Sequence[Sequence[Action | str]] | Path | str
"""A `Schedule`, one order a rank, or a CSV file with one row a rank."""

__all__ = [
    "Action",
    "ClosedForms",
    "Event",
    "Limits",
    "Op",
    "OwnSchedule",
    "Phase",
    "SCHEDULES",
    "Schedule",
    "ScheduleError",
    "ScheduleMethod",
    "StageTimes",
    "TickTable",
    "Timeline",
    "WeightVersions",
    "auto",
    "check_schedule",
    "check_size",
    "dualpipe_v",
    "gpipe",
    "idle_fraction",
    "interleaved_1f1b",
    "lock_step_span_s",
    "looped_bfs",
    "make_schedule",
    "one_f_one_b",
    "peak_in_flight",
    "pipedream_stash",
    "plan_refusal",
    "problems",
    "read_csv",
    "schedule_from_orders",
    "schedule_method",
    "search_schedule",
    "simulate",
    "size_refusals",
    "tick_table",
    "to_csv",
    "v_half",
    "v_min",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_paper_hop",
    "zero_bubble_v",
]


def make_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    chunks: int | None = None,
    *,
    max_pending_w: int = 0,
) -> Schedule:
    """Return the schedule of that name.

    Args:
        name: One of `SCHEDULES`.
        num_ranks: Size of the `stage` mesh axis.
        num_microbatches: Microbatches of one step.
        chunks: Stages of one rank; when left out the schedule's own number, or 1.
        max_pending_w: Most weight gradients that wait on a rank; 0 for any number.

    Raises:
        InputError: No such schedule, or sizes that it cannot have.

    Example:
        >>> schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=2)
        >>> print(to_csv(schedule), end="")
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
    """
    chunks = schedule_method(name).default_chunks if chunks is None else chunks
    require_counts(stages=num_ranks, microbatches=num_microbatches, chunks=chunks)
    sizes = num_ranks, num_microbatches, chunks
    for refusal in size_refusals(name, *sizes, max_pending_w).values():
        raise refusal
    return SCHEDULES[name](*sizes, max_pending_w=max_pending_w)


def size_refusals(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    chunks: int,
    max_pending_w: int = 0,
) -> dict[str, InputError]:
    """Return why a schedule does not exist for these sizes, by the layout's key.

    Raises:
        InputError: No such schedule.
    """
    method = schedule_method(name)
    refusals = method.refusals(num_ranks, num_microbatches, chunks)
    if max_pending_w and not method.splits_backward:
        refusals["max_pending_w"] = nothing_pending(name, max_pending_w)
    others = [other for other in SCHEDULES if SCHEDULES[other].has_chunks(chunks)]
    if "chunks" in refusals and others:
        refused = refusals["chunks"]
        refusals["chunks"] = InputError(
            f"{refused}, or choose {' or '.join(others)}", key=refused.key
        )
    return refusals


def plan_refusal(name: str) -> InputError | None:
    """Return the error of a schedule that the planner does not compare, or None.

    Raises:
        InputError: No such schedule.
    """
    if not schedule_method(name).updates_each_microbatch:
        return None
    return InputError(
        f"schedule={name} changes what is trained, so that no plan compares it "
        "with others; name it in the layout of a step, or estimate schedule=1f1b, "
        "whose ticks it has",
        key="schedule.changes_the_update",
    )


def schedule_method(name: str) -> ScheduleMethod:
    """Return the method of that name.

    Raises:
        InputError: There is none; the nearest names are in the message.
    """
    if not isinstance(name, str) or name not in SCHEDULES:
        raise InputError(
            f"no schedule {name!r}; {nearest(str(name), SCHEDULES)}",
            key="schedule.unknown_name",
        )
    return SCHEDULES[name]


def chosen_schedule(
    given: OwnSchedule,
    *,
    num_ranks: int,
    num_microbatches: int,
    chunks: int = 1,
    max_pending_w: int = 0,
) -> Schedule:
    """Return the checked schedule that a pipeline runs.

    Args:
        given: A name in `SCHEDULES`, or your own schedule (`OwnSchedule`).
        num_ranks: Size of the `stage` mesh axis.
        num_microbatches: Microbatches of one step.
        chunks: Stages of one rank.
        max_pending_w: Most weight gradients that wait on a rank; 0 for any number.

    Raises:
        InputError: No such schedule or file, or one made for other sizes.
        ScheduleError: Work missing, doubled or misplaced, or a deadlock.

    Example:
        >>> orders = [["0F0", "0B0"], ["1F0", "1B0"]]
        >>> chosen_schedule(orders, num_ranks=2, num_microbatches=1).num_stages
        2
    """
    if isinstance(given, str) and not given.endswith(".csv"):
        if given not in SCHEDULES and Path(given).exists():
            raise InputError(
                f"schedule file {given!r}: end its name in .csv",
                key="schedule.file_not_csv",
            )
        sizes = num_ranks, num_microbatches, chunks
        return make_schedule(given, *sizes, max_pending_w=max_pending_w)
    schedule = own_schedule(given)
    check_size(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        chunks=chunks,
    )
    return schedule.with_most_pending(max_pending_w) if max_pending_w else schedule


def own_schedule(given: OwnSchedule) -> Schedule:
    """Return your own schedule, checked, whatever its sizes.

    Raises:
        InputError: A file or a cell that cannot be read.
        ScheduleError: Work missing, doubled or misplaced, or a deadlock.
    """
    if isinstance(given, str | Path):
        schedule = read_csv(given)
    else:
        schedule = given if isinstance(given, Schedule) else schedule_from_orders(given)
    check_schedule(schedule)
    return schedule


method_of = renamed("method_of", schedule_method)
schedule_of = renamed("schedule_of", schedule_from_orders)
