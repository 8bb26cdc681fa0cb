"""Interleaved 1F1B: 1F1B in which every rank has v chunks of the model.

Stage c*p + r is chunk c of rank r. Microbatches go through in groups: a group runs
chunk 0, then chunk 1, ...; backwards take the chunks last to first. Groups are as even
as possible and hold at least p microbatches (fewer only if m < p), so m need not be a
multiple of p. Bubble (p-1)/(v m + p-1) for m >= p. For m < p the first microbatch's
path through all v p stages is the bound: (v (p-m) + m-1)/(v p + m-1).

Every hop pays its latency, those from the last rank to the first ("wraps") too. For m
a multiple of p a step then shows 2 (v p - 1) hops: once up and once down all stages.
The zero-bubble paper's table shows p fewer, because its replay lets most microbatches
wrap without waiting for what they read: `zero_bubble_paper_hop`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshpar.schedules.base import Action, Op
from meshpar.schedules.method import ClosedForms, Orders, ScheduleMethod, filled_once
from meshpar.schedules.simulate import Hop


def one_for_one_orders(num_ranks: int, num_microbatches: int, chunks: int) -> Orders:
    """Return the orders of v chunks a rank; with one chunk those of 1F1B."""
    groups = microbatch_groups(num_ranks, num_microbatches)
    upward = [(c, i) for group in groups for c in range(chunks) for i in group]
    downward = [
        (c, i) for group in groups for c in reversed(range(chunks)) for i in group
    ]
    return tuple(
        _one_for_one(
            [Action(c * num_ranks + rank, Op.F, i) for c, i in upward],
            [Action(c * num_ranks + rank, Op.B, i) for c, i in downward],
            num_warmup=_num_warmup(num_ranks - rank - 1, chunks, len(groups[0])),
        )
        for rank in range(num_ranks)
    )


def _one_for_one(
    forwards: Sequence[Action], backwards: Sequence[Action], *, num_warmup: int
) -> tuple[Action, ...]:
    """Order `num_warmup` forwards, then forwards and backwards in turn, then the rest.

    Example:
        >>> forwards = [Action.parse(f"0F{i}") for i in range(3)]
        >>> backwards = [Action.parse(f"0B{i}") for i in range(3)]
        >>> " ".join(map(str, _one_for_one(forwards, backwards, num_warmup=1)))
        '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    order = list(forwards[:num_warmup])
    for index, backward in enumerate(backwards, start=num_warmup):
        order.extend(forwards[index : index + 1])
        order.append(backward)
    return tuple(order)


def microbatch_groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Return runs of microbatches, as even as possible, at least `num_ranks` in each.

    Example:
        >>> microbatch_groups(2, 7), microbatch_groups(4, 3)
        ([range(0, 3), range(3, 5), range(5, 7)], [range(0, 3)])
    """
    num_groups = max(1, num_microbatches // num_ranks)
    size, num_larger = divmod(num_microbatches, num_groups)
    starts = [g * size + min(g, num_larger) for g in range(num_groups + 1)]
    return [range(*bounds) for bounds in zip(starts[:-1], starts[1:], strict=True)]


def zero_bubble_paper_hop(num_ranks: int, hop_s: float) -> Hop:
    """Return the hops as the zero-bubble paper's interleaved column counts them.

    Every hop pays, but at a wrap (last rank to first, and back) only the first
    microbatch of each group of `num_ranks` waits for its input; the others do not wait
    at all, so that some would start before their input is there. For that table only.

    Reference: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, the table of
    profiled times and bubble rates (arXiv 2401.10241); the count is read from the
    authors' bubble-rate script, `get_interleave_schedule`.
    """

    def hop(source: Action, target: Action) -> float:
        wraps = source.stage // num_ranks != target.stage // num_ranks
        return -math.inf if wraps and source.microbatch % num_ranks else hop_s

    return hop


def _num_warmup(ranks_behind: int, chunks: int, group_size: int) -> int:
    if chunks == 1:
        return ranks_behind  # plain 1F1B; two a rank would only hold more
    return 2 * ranks_behind + (chunks - 1) * group_size


def _in_flight(num_ranks: int, num_microbatches: int, chunks: int) -> tuple[int, ...]:
    """Forwards before a rank's first backward, and the one that alternates."""
    return tuple(
        min(chunks * num_microbatches, 1 + _num_warmup(behind, chunks, num_ranks))
        for behind in reversed(range(num_ranks))
    )


def _lock_step_in_flight(
    num_ranks: int, num_microbatches: int, chunks: int
) -> tuple[int, ...]:
    """Forwards on the way to the last rank and back until a rank's first backward."""
    return tuple(
        min(chunks * num_microbatches, 2 * behind + (chunks - 1) * num_ranks + 1)
        for behind in reversed(range(num_ranks))
    )


ONE_FOR_ONE = ClosedForms(
    length=filled_once,
    in_flight=_in_flight,
    lock_step_in_flight=_lock_step_in_flight,
)
"""Closed forms of `one_for_one_orders`."""

interleaved_1f1b = ScheduleMethod(
    name="interleaved_1f1b",
    orders=one_for_one_orders,
    num_chunks=None,
    closed_forms=ONE_FOR_ONE,
    reference="Narayanan et al., 'Efficient Large-Scale Language Model Training on GPU "
    "Clusters Using Megatron-LM', SC 2021, section 2.2.2 (arXiv 2104.04473); uneven "
    "groups are ours: there p divides m",
)
