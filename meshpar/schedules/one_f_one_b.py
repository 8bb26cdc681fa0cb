"""1F1B (PipeDream-flush): each rank takes a backward as early as it can.

After p-r-1 forwards, rank r alternates one forward and one backward. Bubble
(p-1)/(m+p-1) as GPipe, but rank r has only min(p-r, m) microbatches in flight.

Reference: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML
2021, section 3.2 (arXiv 2006.09503).
"""

from __future__ import annotations

from meshpar.schedules.base import Action, Op, Schedule, require_counts
from meshpar.schedules.streams import one_for_one


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """The 1F1B schedule of one stage a rank."""
    require_counts(stages=num_ranks, microbatches=num_microbatches)
    orders = tuple(
        one_for_one(
            [Action(rank, Op.F, i) for i in range(num_microbatches)],
            [Action(rank, Op.B, i) for i in range(num_microbatches)],
            num_warmup=num_ranks - rank - 1,
        )
        for rank in range(num_ranks)
    )
    return Schedule(orders, num_ranks, num_microbatches, "1f1b")
