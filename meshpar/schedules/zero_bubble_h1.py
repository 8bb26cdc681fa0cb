"""ZB-H1: 1F1B whose backwards are split, so that weight gradients fill the drain.

Rank r does p-1-r forwards, then a forward and an input gradient in turn. It leaves out
its first r weight gradients and does them last. It holds what 1F1B holds, p on every
rank, with a third of its bubble if F, I and W take the same time:

    bubble = (p-1) (F + I - W) / (m (F + I + W) + (p-1) (F + I - W))
"""

from __future__ import annotations

from collections.abc import Iterator

from meshpar.schedules.method import Orders, ScheduleMethod
from meshpar.schedules.steps import numbered


def deferred_weight_gradients(
    num_ranks: int, num_microbatches: int, *, warmup: int
) -> Orders:
    """Return the orders of ZB-H1 (warmup 1) or of ZB-H2 (warmup 2).

    Rank r does `warmup (p-1-r)` forwards first and `warmup r` weight gradients last.
    """
    enough = max(num_microbatches, warmup * (num_ranks - 1))
    return tuple(
        numbered(
            _steps(warmup * (num_ranks - 1 - rank), warmup * rank, enough),
            [rank],
            num_microbatches,
        )
        for rank in range(num_ranks)
    )


def _steps(num_warmup: int, num_deferred: int, num_microbatches: int) -> Iterator[str]:
    steady = num_microbatches - num_warmup - num_deferred
    yield from ["F0"] * num_warmup
    yield from ["F0", "I0"] * num_deferred
    yield from ["F0", "I0", "W"] * steady
    yield from ["I0", "W"] * num_warmup
    yield from ["W"] * num_deferred


zero_bubble_h1 = ScheduleMethod(
    name="zero_bubble_h1",
    orders=lambda p, m, _: deferred_weight_gradients(p, m, warmup=1),
    splits_backward=True,
    reference="Qi et al., 'Zero Bubble Pipeline Parallelism', ICLR 2024, section 2.2 "
    "(arXiv 2401.10241)",
)
