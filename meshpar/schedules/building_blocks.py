"""Schedules that repeat one microbatch's pattern every six units, in a V.

A unit is the time of one F, I or W of a chunk. Each rank has six actions a microbatch:
F0, F1, I1, I0 and two W. If no two of them start at the same time modulo six, the
pattern of every next microbatch fits in six units later, and a rank holds at most

    (sum of its two chunks' lifespans) / 6

chunk inputs, whatever the number of microbatches. A lifespan is a sum of distances
from one rank to the next, so the distances choose the memory. If those of F0 and I0
add up to d, and those of F1 and I1 too, every rank holds about d p / 3 chunk inputs;
1F1B holds p inputs of stages, which are 2p chunks.

Reference: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024,
sections 3 and 4 (arXiv 2405.15362).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from meshpar.schedules.base import Action, Op
from meshpar.schedules.method import Orders, ScheduleMethod
from meshpar.schedules.steps import v_stages

PERIOD = 6
"""Actions of a rank for one microbatch."""

Start = tuple[int, int, Op]
"""Unit in which a rank starts an action of microbatch 0, its chunk, and its kind."""


class Distances(NamedTuple):
    """Units from an action's start on one rank to its start on the next."""

    forward_0: int
    forward_1: int
    input_grad_1: int
    input_grad_0: int


def repeated_block(name: str, distances: Distances) -> ScheduleMethod:
    """Return the schedule that repeats the pattern of these distances."""
    return ScheduleMethod(
        name=name,
        orders=lambda p, m, _: _repeated(p, m, distances),
        num_chunks=2,
        stages_of=v_stages,
        splits_backward=True,
        for_divergent=True,
        reference="Qi et al., 'Pipeline Parallelism with Controllable Memory', NeurIPS "
        "2024, section 4 (arXiv 2405.15362)",
    )


def _repeated(num_ranks: int, num_microbatches: int, distances: Distances) -> Orders:
    """Return the orders of a pattern that starts anew every `PERIOD` units."""
    return tuple(
        _order(starts, v_stages(rank, num_ranks, 2), num_microbatches)
        for rank, starts in enumerate(_pattern(num_ranks, distances))
    )


def _order(
    starts: list[Start], stages: tuple[int, int], num_microbatches: int
) -> tuple[Action, ...]:
    timed = sorted(
        (start + PERIOD * microbatch, Action(stages[chunk], op, microbatch))
        for start, chunk, op in starts
        for microbatch in range(num_microbatches)
    )
    return tuple(action for _, action in timed)


def _pattern(num_ranks: int, distances: Distances) -> list[list[Start]]:
    """Return each rank's starts, its three turns as short as they can be."""
    every = sorted(product(range(1, PERIOD + 1), repeat=3), key=sum)
    for turns in every:
        ranks = [list(starts) for starts in _starts(num_ranks, distances, turns)]
        if all(len({start % PERIOD for start, *_ in starts}) == 4 for starts in ranks):
            return [starts + _weight_gradients(starts) for starts in ranks]
    raise AssertionError(f"no turns keep {distances} of {num_ranks} ranks apart")


def _starts(
    num_ranks: int, distances: Distances, turns: tuple[int, ...]
) -> Iterator[list[Start]]:
    """Yield each rank's F0, F1, I1 and I0.

    A turn is the time between two actions on the rank where the V turns: from F0 to F1
    on the last, F1 to I1 on the first, I1 to I0 on the last.
    """
    last = num_ranks - 1
    to_forward_1 = distances.forward_0 * last + turns[0]
    to_input_1 = to_forward_1 + distances.forward_1 * last + turns[1]
    to_input_0 = to_input_1 + distances.input_grad_1 * last + turns[2]
    for rank in range(num_ranks):
        yield [
            (distances.forward_0 * rank, 0, Op.F),
            (to_forward_1 + distances.forward_1 * (last - rank), 1, Op.F),
            (to_input_1 + distances.input_grad_1 * rank, 1, Op.I),
            (to_input_0 + distances.input_grad_0 * (last - rank), 0, Op.I),
        ]


def _weight_gradients(starts: list[Start]) -> list[Start]:
    """Return the starts of the two W, as soon after their I as units are free."""
    *_, (input_1, _, _), (input_0, _, _) = starts
    used = {start % PERIOD for start, *_ in starts}
    free = [unit for unit in range(PERIOD) if unit not in used]

    def after(input_grad: int, unit: int) -> int:
        return input_grad + 1 + (unit - input_grad - 1) % PERIOD

    return min(
        (
            [(after(input_1, one), 1, Op.W), (after(input_0, other), 0, Op.W)]
            for one, other in (free, reversed(free))
        ),
        key=lambda two: sum(start for start, *_ in two),
    )


v_half = repeated_block(
    "v_half",
    Distances(forward_0=2, forward_1=1, input_grad_1=2, input_grad_0=1),
)
"""V-Half: half the memory of 1F1B, with a smaller bubble than 1F1B's.

It repeats V-Min's building block with two units, not one, from rank to rank for the
forwards of chunk 0 and the input gradients of chunk 1.
"""

v_min = repeated_block(
    "v_min",
    Distances(forward_0=1, forward_1=1, input_grad_1=1, input_grad_0=1),
)
"""V-Min: a third of the memory of 1F1B, the least that a V can hold.

It repeats the building block in which everything goes from rank to rank at once.
"""
