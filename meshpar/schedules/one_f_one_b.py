"""1F1B (PipeDream-flush): each rank takes a backward as early as it can.

After p-r-1 forwards, rank r alternates one forward and one backward. Bubble
(p-1)/(m+p-1) as GPipe, but rank r has only min(p-r, m) microbatches in flight; in lock
step the way to the last rank and back, min(2(p-r)-1, m).
"""

from __future__ import annotations

from meshpar.schedules.base import Action, Op
from meshpar.schedules.closed_forms import ClosedForms, filled_once
from meshpar.schedules.method import Orders, ScheduleMethod
from meshpar.schedules.streams import one_for_one


def _orders(num_ranks: int, num_microbatches: int, _: int) -> Orders:
    return tuple(
        one_for_one(
            [Action(rank, Op.F, i) for i in range(num_microbatches)],
            [Action(rank, Op.B, i) for i in range(num_microbatches)],
            num_warmup=num_ranks - rank - 1,
        )
        for rank in range(num_ranks)
    )


def _in_flight(num_ranks: int, num_microbatches: int, _: int) -> tuple[int, ...]:
    return tuple(min(num_ranks - rank, num_microbatches) for rank in range(num_ranks))


def _lock_step_in_flight(
    num_ranks: int, num_microbatches: int, _: int
) -> tuple[int, ...]:
    return tuple(
        min(2 * (num_ranks - rank) - 1, num_microbatches) for rank in range(num_ranks)
    )


one_f_one_b = ScheduleMethod(
    name="1f1b",
    orders=_orders,
    closed_forms=ClosedForms(
        length=filled_once,
        in_flight=_in_flight,
        lock_step_in_flight=_lock_step_in_flight,
    ),
    reference="Narayanan et al., 'Memory-Efficient Pipeline-Parallel DNN Training', "
    "ICML 2021, section 3.2 (arXiv 2006.09503)",
)
