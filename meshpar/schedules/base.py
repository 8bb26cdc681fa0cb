"""A schedule is data: the order in which each rank does its actions.

As text it is a CSV file with one row a rank, one action a cell, such as 2F0. Empty
cells are skipped, so that PyTorch's compute-only schedule files read too.
"""

from __future__ import annotations

import csv
import enum
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from meshpar.errors import InputError
from meshpar.foreign_files import MOST_BYTES, open_file


class Op(enum.StrEnum):
    """The kinds of work on one microbatch and stage (B = I + W)."""

    F = "F"  # forward
    B = "B"  # full backward
    I = "I"  # backward for the input  # noqa: E741
    W = "W"  # backward for the weights


OP_WORDS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.W: "weight grad",
    Op.I: "input grad",
}
"""Names in a legend, in the order of their colours."""


class Action(NamedTuple):
    """One microbatch's forward or backward through one stage.

    Example:
        >>> action = Action(stage=2, op=Op.F, microbatch=0)
        >>> str(action), Action.parse("2F0") == action
        ('2F0', True)
    """

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that is written `2F0`: stage 2, forward, microbatch 0.

        Raises:
            InputError: It is not written so.
        """
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text.strip(), re.ASCII)
        if match is None:
            raise InputError(
                f"{text!r} is no action; write the stage, F, B, I or W, and the "
                "microbatch, such as 2F0",
                key="schedule.unreadable_action",
            )
        return cls(int(match[1]), Op(match[2]), int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """The ordered actions of every rank.

    A stage lies on the rank whose order names it, so any placement can be written: on
    4 ranks, stages 0 and 4 on rank 0 (interleaved), or 0 and 7 (V-shaped).

    Args:
        orders: Each rank's actions, first to last.
        num_stages: Stages of all ranks together, a multiple of the ranks.
        num_microbatches: Microbatches of one step.
        name: What errors and reports call it.
        max_pending_w: Most weight gradients that wait on a rank in lock step, where the
            order leaves their ticks open; 0 for any number (`with_most_pending`).

    Raises:
        InputError: No ranks, or sizes that are no schedule's. `check_schedule` reads
            the orders themselves.

    Example:
        >>> orders = [[Action(0, Op.F, 0), Action(0, Op.B, 0)]]
        >>> Schedule(orders, num_stages=1, num_microbatches=1).num_ranks
        1
    """

    orders: tuple[tuple[Action, ...], ...]
    num_stages: int
    num_microbatches: int
    name: str = "custom"
    max_pending_w: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "orders", tuple(map(tuple, self.orders)))
        require_counts(
            stages=self.num_stages,
            microbatches=self.num_microbatches,
            ranks=len(self.orders),
        )
        if self.num_stages % self.num_ranks:
            raise InputError(
                f"schedule {self.name!r}: {self.num_stages} stages do not divide over "
                f"{self.num_ranks} ranks; give every rank the same number of chunks",
                key="schedule.indivisible_stages",
            )

    @property
    def num_ranks(self) -> int:
        """Size of the `stage` mesh axis."""
        return len(self.orders)

    @property
    def num_chunks(self) -> int:
        """Stages of one rank."""
        return self.num_stages // self.num_ranks

    @cached_property
    def rank_of_stage(self) -> dict[int, int]:
        """Rank of each stage: the first rank whose order names it."""
        ranks: dict[int, int] = {}
        for rank, order in enumerate(self.orders):
            for action in order:
                ranks.setdefault(action.stage, rank)
        return ranks

    @cached_property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """Each rank's stages in rising order: its chunk 0, 1, ..."""
        return tuple(
            tuple(
                stage
                for stage in sorted(self.rank_of_stage)
                if self.rank_of_stage[stage] == rank
            )
            for rank in range(self.num_ranks)
        )

    @cached_property
    def actions(self) -> frozenset[Action]:
        """All actions of all ranks."""
        return frozenset(action for order in self.orders for action in order)

    @cached_property
    def splits_backward(self) -> bool:
        """True if any backward is an I and a W."""
        return any(action.op is Op.W for action in self.actions)

    def with_split_backwards(self) -> Schedule:
        """Return the schedule with an I and a W right behind it in place of each B."""
        orders = tuple(
            tuple(
                action._replace(op=op)
                for action in order
                for op in ((Op.I, Op.W) if action.op is Op.B else (action.op,))
            )
            for order in self.orders
        )
        return replace(self, orders=orders)

    def with_most_pending(self, count: int) -> Schedule:
        """Return the schedule with at most `count` weight gradients waiting on a rank.

        Before an input gradient that would leave one more, a rank does a weight
        gradient that waits, so all else keeps its order.

        Raises:
            InputError: No backward is split, or `count` is below 1.
        """
        require_counts(max_pending_w=count)
        if not self.splits_backward:
            raise nothing_pending(self.name, count)
        orders = tuple(_with_most_pending(order, count) for order in self.orders)
        return replace(self, orders=orders, max_pending_w=count)

    def with_one_microbatch(self) -> Schedule:
        """Return the schedule for the first microbatch alone."""
        orders = tuple(
            tuple(action for action in order if action.microbatch == 0)
            for order in self.orders
        )
        return replace(self, orders=orders, num_microbatches=1)

    def inputs(self, action: Action) -> tuple[Action, ...]:
        """Return the actions whose results `action` reads.

        A forward reads the stage before it; a backward its own forward and the
        gradient of the stage behind it; W what I left.
        """
        stage, op, microbatch = action
        if op is Op.F:
            return (Action(stage - 1, Op.F, microbatch),) if stage else ()
        if op is Op.W:
            return (Action(stage, Op.I, microbatch),)
        forward = Action(stage, Op.F, microbatch)
        if stage == self.num_stages - 1:
            return (forward,)
        return (forward, self.gradient_source(action))

    def gradient_source(self, action: Action) -> Action:
        """Return the backward of the next stage, B or I, whose gradient it reads."""
        split = Action(action.stage + 1, Op.I, action.microbatch)
        return split if split in self.actions else split._replace(op=Op.B)


def nothing_pending(name: str, max_pending_w: int) -> InputError:
    """Return the error of a limit for a schedule whose backwards are whole."""
    return InputError(
        f"max_pending_w={max_pending_w}: no weight gradient waits in schedule "
        f"{name!r}, whose backwards are whole; leave it out",
        key="schedule.nothing_pending",
    )


def _with_most_pending(order: Sequence[Action], count: int) -> tuple[Action, ...]:
    place = {action: at for at, action in enumerate(order)}
    bounded: list[Action] = []
    waiting: list[Action] = []
    for action in order:
        # An I that finds no room makes some; a W is the next of those that wait.
        full = action.op is Op.I and len(waiting) == count
        if full or (action.op is Op.W and waiting):
            first = min(waiting, key=place.__getitem__)
            waiting.remove(first)
            bounded.append(first)
        if action.op is Op.I:
            waiting.append(action._replace(op=Op.W))
        if action.op is not Op.W:
            bounded.append(action)
    return tuple(bounded)


def require_counts(**counts: int) -> None:
    """Refuse a count that is no whole number of at least 1, named by its keyword."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InputError(
                f"{name}={count!r}: must be a whole number of at least 1",
                key="schedule.not_whole_number",
            )


def schedule_from_orders(
    orders: Iterable[Sequence[Action | str]], *, name: str = "custom"
) -> Schedule:
    """Return the schedule of your own orders; its sizes are those the actions name.

    Raises:
        InputError: A cell is no action, or the orders have no size of a schedule.

    Example:
        >>> schedule = schedule_from_orders([["0F0", "0B0"], ["1F0", "1B0"]])
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
    """Return the schedule of a CSV file with one row a rank.

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
    return schedule_from_orders(orders, name=str(path))


def to_csv(schedule: Schedule) -> str:
    """Return the orders as `read_csv` reads them."""
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
