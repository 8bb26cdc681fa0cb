"""The planner's view of a step: its own model, traced, and its layout."""

from __future__ import annotations

from dataclasses import replace

import jax

from meshpar.audit.block_trace import traced_workload
from meshpar.hardware.devices import DEVICES
from meshpar.machine.mesh import platform_of
from meshpar.model.inputs import open_size
from meshpar.model.token_order import TokenOrder
from meshpar.planner.cost.run import Run
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.execution import MESHPAR
from meshpar.schedules import tick_table
from meshpar.train.step import Batch, TrainStep


def planned_run(step: TrainStep, batch: Batch) -> Run:
    """The planner's view of the step's own model and layout."""
    layout = step.layout
    global_batch = next(iter(batch.values())).shape[0]
    seq = open_size(step.model.known_inputs, batch)
    held = tick_table(step.schedule).peak_in_flight if step.schedule else None

    def run_of(order: TokenOrder | None) -> Run:
        workload = traced_workload(
            step.model_as_given, seq=seq, precision=layout.precision, order=order
        )
        return Run(
            workload=workload,
            cluster=_cluster(step),
            layout=layout,
            execution=MESHPAR,
            global_batch=global_batch,
            seq=seq,
            stage_blocks=step.layers_of_stages or (workload.layers,),
            chunks_held=held,
        )

    whole = run_of(None)
    if layout.context == 1 and not whole.fused_attention:
        return whole
    # Tiles and a fused kernel alike keep no softmax.
    return run_of(TokenOrder(mesh_axis="context", num_ranks=1))


def _cluster(step: TrainStep) -> Cluster:
    """As many devices as the step has; nothing but their platform matters here."""
    platform = platform_of(step.mesh)
    if platform == "gpu" and jax.default_backend() != "gpu":
        # An absent one has no fused attention (`meshpar.models.layers.attention`).
        platform = "cpu"
    device = replace(DEVICES["h100-80gb"], platform=platform)
    return Cluster(device=device, devices_per_host=step.layout.num_devices)
