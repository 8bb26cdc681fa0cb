"""1F1B (PipeDream-flush): each rank takes a backward as early as it can.

After p-r-1 forwards, rank r alternates one forward and one backward. Bubble
(p-1)/(m+p-1) as GPipe, but rank r has only min(p-r, m) microbatches in flight; in lock
step the way to the last rank and back, min(2(p-r)-1, m). It is interleaved 1F1B with
one chunk a rank.
"""

from __future__ import annotations

from meshpar.schedules.interleaved_1f1b import ONE_FOR_ONE, one_for_one_orders
from meshpar.schedules.method import ScheduleMethod

one_f_one_b = ScheduleMethod(
    name="1f1b",
    orders=one_for_one_orders,
    closed_forms=ONE_FOR_ONE,
    reference="Narayanan et al., 'Memory-Efficient Pipeline-Parallel DNN Training', "
    "ICML 2021, section 3.2 (arXiv 2006.09503)",
)
