"""DualPipeV: half of DualPipe, its two directions as the two chunks of a V.

In its steady part a forward of one chunk stands beside the backward of another
microbatch's other chunk, so all-to-alls of the one can hide behind the other. Few of
its backwards are split: those that fill the pipeline's ends.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshpar.schedules.method import ScheduleMethod
from meshpar.schedules.steps import v_orders, v_stages


def _steps(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[str]:
    behind, ahead = num_ranks - rank - 1, rank + 1
    yield from ["F0"] * (2 * behind)
    yield from ["F0", "F1"] * ahead
    yield from ["I1", "W", "F1"] * behind
    yield from ["F0", "B1", "F1", "B0"] * (num_microbatches - 2 * num_ranks + ahead)
    yield from ["B1", "F1", "B0"] * behind
    drain = ["B1", "B0"] * ahead
    for at, step in enumerate(drain):  # the second half is split
        yield step if at < ahead else step.replace("B", "I")
    yield from ["W", "I0"] * behind
    yield from ["W"] * ahead


dualpipe_v = ScheduleMethod(
    name="dualpipe_v",
    orders=lambda p, m, _: v_orders(_steps, p, m, least=2 * p),
    num_chunks=2,
    stages_of=v_stages,
    splits_backward=True,
    for_divergent=True,
    reference="DeepSeek-AI, 'DeepSeek-V3 Technical Report', 2024, section 3.2.1 (arXiv "
    "2412.19437); in a V: Qi et al., 'DualPipe Could Be Better Without the Dual', 2025",
)
