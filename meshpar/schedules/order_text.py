"""Orders as text: a CSV with one row a rank, one action a cell, such as 2F0.

Empty cells are skipped, so that PyTorch's compute-only schedule files read too.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from meshpar.errors import InputError
from meshpar.foreign_files import MOST_BYTES, open_file
from meshpar.schedules.base import Action, Schedule


def schedule_of(
    orders: Iterable[Sequence[Action | str]], *, name: str = "custom"
) -> Schedule:
    """The schedule of one's own orders; its sizes are those the actions name.

    Raises:
        InputError: A cell is no action, or the orders have no size of a schedule.

    Example:
        >>> schedule = schedule_of([["0F0", "0B0"], ["1F0", "1B0"]])
        >>> schedule.num_stages, schedule.num_microbatches
        (2, 1)
    """
    ranks = tuple(
        tuple(_action(cell, name, rank) for cell in order)
        for rank, order in enumerate(orders)
    )
    actions = [action for order in ranks for action in order]
    if not actions:
        raise InputError(
            f"schedule {name!r} has no actions; give one order a rank",
            key="schedule.no_actions",
        )
    return Schedule(
        ranks,
        num_stages=1 + max(action.stage for action in actions),
        num_microbatches=1 + max(action.microbatch for action in actions),
        name=name,
    )


def read_csv(path: str | Path) -> Schedule:
    """The schedule of a file with one row a rank.

    Raises:
        InputError: It is no text, a cell is no action, or there are none.
    """
    try:
        with open_file(path) as file:
            text = file.read(MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"schedule {str(path)!r} is no text: {error.reason}",
            key="schedule.unreadable_file",
        ) from None
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    orders = [[cell for cell in row if cell.strip()] for row in rows]
    return schedule_of(orders, name=str(path))


def to_csv(schedule: Schedule) -> str:
    """The orders as `read_csv` reads them."""
    return "".join(",".join(map(str, order)) + "\n" for order in schedule.orders)


def _action(cell: Action | str, name: str, rank: int) -> Action:
    if isinstance(cell, Action):
        return cell
    try:
        return Action.parse(cell)
    except InputError as error:
        raise InputError(
            f"schedule {name!r}, rank {rank}: {error}", key=error.key
        ) from None
