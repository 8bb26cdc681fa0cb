"""Looped breadth-first: all microbatches through a chunk before the next chunk.

Stage c*p + r is chunk c of rank r. Backwards take the chunks last to first. Bubble
(p-1)/(v m + p-1) for m >= p, all v m chunk inputs in flight; a chunk's weights are
needed once forward and once backward, so FSDP gathers them least often.
"""

from __future__ import annotations

from meshpar.schedules.base import Action, Op
from meshpar.schedules.method import HOLDS_ALL, Orders, ScheduleMethod


def _orders(num_ranks: int, num_microbatches: int, chunks: int) -> Orders:
    upward = [(Op.F, chunk) for chunk in range(chunks)]
    downward = [(Op.B, chunk) for chunk in reversed(range(chunks))]
    return tuple(
        tuple(
            Action(chunk * num_ranks + rank, op, microbatch)
            for op, chunk in upward + downward
            for microbatch in range(num_microbatches)
        )
        for rank in range(num_ranks)
    )


looped_bfs = ScheduleMethod(
    name="looped_bfs",
    orders=_orders,
    num_chunks=None,
    closed_forms=HOLDS_ALL,
    no_better_than="interleaved_1f1b",
    reference="Lamy-Poirier, 'Breadth-First Pipeline Parallelism', MLSys 2023, section "
    "4 (arXiv 2211.05953)",
)
