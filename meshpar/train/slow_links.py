"""Which mesh axes of a step lie on a slower link than they could."""

from __future__ import annotations

from collections import Counter

from jax.sharding import Mesh

from meshpar.machine.mesh import hosts_of, slow_axes_of
from meshpar.machine.mesh_order import SlowAxis
from meshpar.planner.cost.step_traffic import sent_in_a_step
from meshpar.train.planned_run import planned_run
from meshpar.train.step import Batch, TrainStep


def slow_links(step: TrainStep, batch: Batch) -> tuple[SlowAxis, ...]:
    """Those axes, the worst first, by the planner's count of what each sends.

    Nothing is compiled; `audit` counts what the compiled program sends.

    Args:
        step: From `make_train_step`, on devices.
        batch: Arrays or their shapes.
    """
    mesh = step.mesh
    if not isinstance(mesh, Mesh) or len(set(hosts_of(mesh))) == 1:
        return ()
    sent: Counter[tuple[str, ...]] = Counter()
    for one in sent_in_a_step(planned_run(step, batch)):
        sent[one.mesh_axes] += round(one.wire_bytes)
    return slow_axes_of(mesh, sent)
