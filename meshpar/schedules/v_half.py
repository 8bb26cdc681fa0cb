"""V-Half: half the memory of 1F1B, with a smaller bubble than 1F1B's.

It repeats a building block whose chunks live p units longer than V-Min's.
"""

from __future__ import annotations

from meshpar.schedules.building_blocks import Distances, repeated
from meshpar.schedules.method import ScheduleMethod
from meshpar.schedules.steps import v_stages

_DISTANCES = Distances(forward_0=2, forward_1=1, input_grad_1=2, input_grad_0=1)

v_half = ScheduleMethod(
    name="v_half",
    orders=lambda p, m, _: repeated(p, m, _DISTANCES),
    num_chunks=2,
    stages_of=v_stages,
    splits_backward=True,
    reference="Qi et al., 'Pipeline Parallelism with Controllable Memory', NeurIPS "
    "2024, section 4 (arXiv 2405.15362)",
)
