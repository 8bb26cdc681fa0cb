"""ZB-H2: ZB-H1 with twice the forwards first, for twice its memory.

Rank r does 2(p-1-r) forwards first, and its first 2r weight gradients last. It holds
2p-1 microbatches, and has no bubble if F, I and W take the same time:

    bubble = (p-1) (F + I - 2W) / (m (F + I + W) + (p-1) (F + I - 2W))
"""

from __future__ import annotations

from meshpar.schedules.method import ScheduleMethod
from meshpar.schedules.zero_bubble_h1 import deferred_weight_gradients

zero_bubble_h2 = ScheduleMethod(
    name="zero_bubble_h2",
    orders=lambda p, m, _: deferred_weight_gradients(p, m, warmup=2),
    splits_backward=True,
    for_divergent=True,
    reference="Qi et al., 'Zero Bubble Pipeline Parallelism', ICLR 2024, section 2.3 "
    "(arXiv 2401.10241)",
)
