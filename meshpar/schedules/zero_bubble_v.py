"""ZB-V: two chunks a rank in a V, no bubble, and no more memory than 1F1B.

Chunk 0 goes down the ranks and chunk 1 back up, so rank 0 has the first stage and the
last. Every rank holds 2p inputs of half a stage of 1F1B, as 1F1B's rank 0 does. The
bubble is 0 if F, I and W take the same time and m >= 2p-1.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshpar.schedules.method import ScheduleMethod
from meshpar.schedules.steps import v_orders, v_stages


def _steps(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[str]:
    behind = num_ranks - rank
    backward_0, upward = ["I0", "W"], ["F1", "I1", "W"]
    steady = num_microbatches - num_ranks - behind + 1
    yield from ["F0"] * (2 * behind - 1)
    yield from ["F1", "F0"] * rank
    yield from upward * behind
    yield from ["F0", *backward_0, *upward] * steady
    yield from [*backward_0, *upward] * (behind - 1)
    yield from ["I0", "I1"] * rank
    yield from backward_0 * behind
    yield from ["W"] * (2 * rank)


zero_bubble_v = ScheduleMethod(
    name="zero_bubble_v",
    orders=lambda p, m, _: v_orders(_steps, p, m, least=2 * p - 1),
    num_chunks=2,
    stages_of=v_stages,
    splits_backward=True,
    reference="Qi et al., 'Zero Bubble Pipeline Parallelism', ICLR 2024, section 6 "
    "(arXiv 2401.10241)",
)
