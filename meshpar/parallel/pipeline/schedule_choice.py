"""The schedule that a pipeline runs: one of ours by its name, or the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from meshpar.errors import InputError
from meshpar.schedules import (
    SCHEDULES,
    Action,
    Op,
    Schedule,
    check_schedule,
    check_size,
    make_schedule,
    read_csv,
    schedule_of,
    step_refusal,
)

OwnSchedule: TypeAlias = Schedule | Sequence[Sequence[Action | str]] | Path | str
"""A `Schedule`, one order a rank, or a CSV file with one row a rank."""


def chosen_schedule(
    given: OwnSchedule, *, num_ranks: int, num_microbatches: int, chunks: int = 1
) -> Schedule:
    """The checked schedule that `given` stands for.

    Args:
        given: A name in `SCHEDULES`, or a schedule of one's own (`OwnSchedule`).
        num_ranks: Size of the `stage` mesh axis.
        num_microbatches: Microbatches of one step.
        chunks: Stages of one rank.

    Raises:
        InputError: No such schedule or file, one made for other sizes, or one that
            splits its backwards.
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
        refused = step_refusal(given)
        if refused is not None:
            raise refused
        return make_schedule(given, num_ranks, num_microbatches, chunks)
    schedule = own_schedule(given)
    check_size(
        schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        chunks=chunks,
    )
    return schedule


def own_schedule(given: OwnSchedule) -> Schedule:
    """A schedule of one's own, checked, whatever its sizes.

    Raises:
        InputError: A file or a cell that cannot be read, or backwards that are split.
        ScheduleError: Work missing, doubled or misplaced, or a deadlock.
    """
    if isinstance(given, str | Path):
        schedule = read_csv(given)
    else:
        schedule = given if isinstance(given, Schedule) else schedule_of(given)
    check_schedule(schedule)
    split = [str(action) for action in sorted(schedule.actions) if action.op in "IW"]
    if split:
        raise InputError(
            f"schedule {schedule.name!r} splits backwards ({', '.join(split[:4])}, "
            f"{len(split)} in all), but every rank runs whole backwards in lock step; "
            f"write {Op.B} for each I, and leave W out",
            key="schedule.split_backward",
        )
    return schedule
