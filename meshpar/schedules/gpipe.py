"""GPipe: all forwards of a rank, then all its backwards.

Bubble (p-1)/(m+p-1); a rank has all m microbatches in flight.

Reference: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using
Pipeline Parallelism", NeurIPS 2019, section 2.3 (arXiv 1811.06965).
"""

from __future__ import annotations

from meshpar.schedules.base import Action, Op, Schedule, require_counts


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """The GPipe schedule of one stage a rank."""
    require_counts(stages=num_ranks, microbatches=num_microbatches)
    orders = tuple(
        tuple(
            Action(stage, op, microbatch)
            for op in (Op.F, Op.B)
            for microbatch in range(num_microbatches)
        )
        for stage in range(num_ranks)
    )
    return Schedule(orders, num_ranks, num_microbatches, "gpipe")
