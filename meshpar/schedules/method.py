"""A schedule's method: its orders for any sizes, and its closed forms.

p ranks (the size of the `stage` mesh axis), m microbatches and v chunks (stages of one
rank), in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshpar.errors import InputError
from meshpar.schedules.base import Action, Schedule, require_counts


@dataclass(frozen=True, kw_only=True)
class ClosedForms:
    """Length and in-flight counts without a replay, each a function of (p, m, v).

    Args:
        length: A step in times of one chunk's F and B, stages being equal and hops
            free; where p divides m also the ticks with a forward, and those with a
            backward, of its lock step. The bubble is `(length - v m) / length`.
        in_flight: Chunk inputs that each rank holds at most, ranks running freely:
            exact where p divides m, and elsewhere no more than the first rank holds.
        lock_step_in_flight: The same where all ranks move together.
    """

    length: Callable[[int, int, int], int]
    in_flight: Callable[[int, int, int], tuple[int, ...]]
    lock_step_in_flight: Callable[[int, int, int], tuple[int, ...]]


def filled_once(num_ranks: int, num_microbatches: int, chunks: int) -> int:
    """Return the length of a step that fills and drains the pipeline once.

        v m + p - 1, or v p + m - 1 where m < p: the first microbatch's way

    Example:
        >>> filled_once(4, 8, 1), filled_once(4, 3, 2)
        (11, 10)
    """
    few, many = sorted((num_ranks, num_microbatches))
    return chunks * many + few - 1


def everything(num_ranks: int, num_microbatches: int, chunks: int) -> tuple[int, ...]:
    """Return what is in flight if all forwards come before the first backward: v m."""
    return (chunks * num_microbatches,) * num_ranks


HOLDS_ALL = ClosedForms(
    length=filled_once, in_flight=everything, lock_step_in_flight=everything
)
"""Closed forms if the pipeline fills once, all forwards before the backwards."""


Orders = Sequence[Sequence[Action]]
"""Every rank's actions, first to last."""


def in_turn(rank: int, num_ranks: int, chunks: int) -> range:
    """Return the stages of a rank if stage c*p + r is chunk c of rank r.

    Example:
        >>> [*in_turn(1, num_ranks=4, chunks=2)]
        [1, 5]
    """
    return range(rank, num_ranks * chunks, num_ranks)


@dataclass(frozen=True, kw_only=True)
class ScheduleMethod:
    """How a schedule orders the work of p ranks, m microbatches and v chunks a rank.

    Name, orders and reference are enough of one stage a rank. Closed forms save the
    planner replays of the orders.

    Args:
        name: What a layout and every command call it.
        orders: (p, m, v) -> the orders.
        reference: Who described it, and where.
        num_chunks: The one number of chunks that it exists for; None is any number.
        stages_of: (rank, p, v) -> the stages of a rank, its chunk 0 first.
        microbatches_refusal: (p, m) -> why it does not exist for so many microbatches,
            and a way out; None where it does.
        splits_backward: Whether any of its backwards are I and W.
        updates_each_microbatch: Whether each stage updates its weights after every
            backward, which changes what is trained.
        closed_forms: Its length and what is in flight.
        orders_within: (p, m, v, count) -> orders in which at most `count` weight
            gradients of a rank wait; None to take those of `orders`, with some weight
            gradients earlier (`Schedule.with_most_pending`).
        for_divergent: True if a search leaves it out in lock step, where another one
            has no more ticks.
        no_better_than: Another schedule's name that is as long for any sizes and holds
            no more: the planner's search takes that one.

    Example:
        >>> from meshpar.schedules.gpipe import gpipe
        >>> gpipe(num_ranks=2, num_microbatches=3).num_stages
        2
        >>> print(gpipe.refusals(num_ranks=2, num_microbatches=3, chunks=2)["chunks"])
        chunks=2: schedule 'gpipe' has one stage a rank; leave chunks out
    """

    name: str
    orders: Callable[[int, int, int], Orders]
    reference: str
    num_chunks: int | None = 1
    stages_of: Callable[[int, int, int], Sequence[int]] = in_turn
    microbatches_refusal: Callable[[int, int], str | None] = lambda p, m: None
    splits_backward: bool = False
    updates_each_microbatch: bool = False
    closed_forms: ClosedForms | None = None
    orders_within: Callable[[int, int, int, int], Orders] | None = None
    for_divergent: bool = False
    no_better_than: str | None = None

    def __call__(
        self,
        num_ranks: int,
        num_microbatches: int,
        chunks: int | None = None,
        *,
        max_pending_w: int = 0,
    ) -> Schedule:
        """Return the schedule of these sizes; `chunks` defaults to `default_chunks`.

        Args:
            num_ranks: Ranks.
            num_microbatches: Microbatches of one step.
            chunks: Stages of one rank.
            max_pending_w: Most weight gradients that wait on a rank; 0 for any number.

        Raises:
            InputError: A size below 1, or one that it does not exist for.
        """
        chunks = self.default_chunks if chunks is None else chunks
        require_counts(stages=num_ranks, microbatches=num_microbatches, chunks=chunks)
        for refusal in self.refusals(num_ranks, num_microbatches, chunks).values():
            raise refusal
        sizes, search = (num_ranks, num_microbatches, chunks), self.orders_within
        if max_pending_w and search is not None:
            orders = search(*sizes, max_pending_w)
        else:
            orders = self.orders(*sizes)
        of_ranks = tuple(map(tuple, orders))
        made = Schedule(of_ranks, num_ranks * chunks, num_microbatches, self.name)
        return made.with_most_pending(max_pending_w) if max_pending_w else made

    @property
    def default_chunks(self) -> int:
        """The only number of chunks that it exists for, or 1."""
        return self.num_chunks or 1

    def has_chunks(self, chunks: int) -> bool:
        """Return True if it exists for so many stages a rank."""
        return self.num_chunks in (None, chunks)

    def exists(self, num_ranks: int, num_microbatches: int, chunks: int) -> bool:
        """Return True if it exists for these sizes."""
        return not self.refusals(num_ranks, num_microbatches, chunks)

    def refusals(
        self, num_ranks: int, num_microbatches: int, chunks: int
    ) -> dict[str, InputError]:
        """Return why there is no schedule of these sizes, by key of a layout."""
        refusals = {}
        if not self.has_chunks(chunks):
            one = "one stage a rank; leave chunks out"
            more = f"{self.num_chunks} stages a rank; set chunks={self.num_chunks}"
            refusals["chunks"] = InputError(
                f"chunks={chunks}: schedule {self.name!r} has "
                f"{one if self.num_chunks == 1 else more}",
                key="schedule.unsupported_chunks",
            )
        refusal = self.microbatches_refusal(num_ranks, num_microbatches)
        if refusal is not None:
            refusals["microbatches"] = InputError(
                f"microbatches={num_microbatches}: schedule {self.name!r} {refusal}",
                key="schedule.unsupported_microbatches",
            )
        return refusals
