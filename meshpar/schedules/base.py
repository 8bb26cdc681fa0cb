"""A schedule is data: the order in which each rank does its actions."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from meshpar.errors import InputError


class Op(enum.StrEnum):
    """What an action does with one microbatch on one stage (B = I + W)."""

    F = "F"  # forward
    B = "B"  # full backward
    I = "I"  # backward for the input  # noqa: E741
    W = "W"  # backward for the weights


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
        """The action that is written `2F0`: stage 2, forward, microbatch 0.

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
        """The rank of each stage that an order names, the first that does."""
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

    def of_one_microbatch(self) -> Schedule:
        """The same stages on the same ranks, for the first microbatch alone."""
        orders = tuple(
            tuple(action for action in order if action.microbatch == 0)
            for order in self.orders
        )
        return replace(self, orders=orders, num_microbatches=1)

    def inputs(self, action: Action) -> tuple[Action, ...]:
        """The actions whose results `action` reads.

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
        """The backward of the next stage, B or I, whose gradient `action` reads."""
        split = Action(action.stage + 1, Op.I, action.microbatch)
        return split if split in self.actions else split._replace(op=Op.B)


def require_counts(**counts: int) -> None:
    """Refuses a count that is no whole number of at least 1.

    Raises:
        InputError: One is not; it is named as its keyword.
    """
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InputError(
                f"{name}={count!r}: must be a whole number of at least 1",
                key="schedule.not_whole_number",
            )
