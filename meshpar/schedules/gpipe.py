"""GPipe: all forwards of a rank, then all its backwards.

Bubble (p-1)/(m+p-1); a rank has all m microbatches in flight.
"""

from __future__ import annotations

from meshpar.schedules.base import Action, Op
from meshpar.schedules.method import HOLDS_ALL, Orders, ScheduleMethod


def _orders(num_ranks: int, num_microbatches: int, _: int) -> Orders:
    return tuple(
        tuple(
            Action(stage, op, microbatch)
            for op in (Op.F, Op.B)
            for microbatch in range(num_microbatches)
        )
        for stage in range(num_ranks)
    )


gpipe = ScheduleMethod(
    name="gpipe",
    orders=_orders,
    closed_forms=HOLDS_ALL,
    no_better_than="1f1b",
    reference="Huang et al., 'GPipe: Efficient Training of Giant Neural Networks using "
    "Pipeline Parallelism', NeurIPS 2019, section 2.3 (arXiv 1811.06965)",
)
