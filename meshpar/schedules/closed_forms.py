"""What a schedule takes, known without a replay: functions of its sizes.

p ranks (the size of the `stage` mesh axis), m microbatches and v chunks (stages of one
rank), in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ClosedForms:
    """Length and in-flight counts of a schedule, each a function of (p, m, v).

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
    """The length of a step that fills and drains the pipeline once.

        v m + p - 1, or v p + m - 1 where m < p: the first microbatch's way

    Example:
        >>> filled_once(4, 8, 1), filled_once(4, 3, 2)
        (11, 10)
    """
    few, many = sorted((num_ranks, num_microbatches))
    return chunks * many + few - 1


def everything(num_ranks: int, num_microbatches: int, chunks: int) -> tuple[int, ...]:
    """In flight where a rank ends its forwards before its first backward: v m."""
    return (chunks * num_microbatches,) * num_ranks


HOLDS_ALL = ClosedForms(
    length=filled_once, in_flight=everything, lock_step_in_flight=everything
)
"""Of a schedule that fills the pipeline once, all forwards before the backwards."""
