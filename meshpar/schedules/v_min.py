"""V-Min: a third of the memory of 1F1B, the least that a V can hold.

It repeats the building block in which everything goes from rank to rank at once.
"""

from __future__ import annotations

from meshpar.schedules.building_blocks import Distances, repeated
from meshpar.schedules.method import ScheduleMethod
from meshpar.schedules.steps import v_stages

_DISTANCES = Distances(forward_0=1, forward_1=1, input_grad_1=1, input_grad_0=1)

v_min = ScheduleMethod(
    name="v_min",
    orders=lambda p, m, _: repeated(p, m, _DISTANCES),
    num_chunks=2,
    stages_of=v_stages,
    splits_backward=True,
    reference="Qi et al., 'Pipeline Parallelism with Controllable Memory', NeurIPS "
    "2024, section 4 (arXiv 2405.15362)",
)
