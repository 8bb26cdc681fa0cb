"""Plans of a model with tables: what is asked, and the plan of so many devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax

from meshpar.audit.kernels import traced_kernels
from meshpar.errors import InputError
from meshpar.hardware import device as matmul_time
from meshpar.layout import MESH_AXES, Layout
from meshpar.machine.mesh import absent_mesh
from meshpar.model.contract import Model
from meshpar.model.inputs import BATCH_DIM, input_shapes
from meshpar.model.scope import Scope
from meshpar.model.single import loss
from meshpar.planner.cost.estimate import gigabytes
from meshpar.planner.cost.step_time import StepTime, straggler_fraction
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.collective_cost import all_reduce_s
from meshpar.planner.plan import Plan
from meshpar.planner.search.space import Constraints
from meshpar.planner.volumes import Kernel
from meshpar.tables.optimizers import RowwiseAdagrad
from meshpar.tables.plan import TableRun, table_plan
from meshpar.tables.step import TableStep, with_tables
from meshpar.tables.table import Table
from meshpar.tables.tables import embedding_tables
from meshpar.tables.traffic import table_traffic
from meshpar.trace.operations import operations
from meshpar.train.make_step import make_train_step

_VALUE_BYTES, _GRADIENT_BYTES, _UPDATE_BYTES = 4, 4, 28
"""Bytes of a value, of a parameter's gradient, and moved by Adam's update of it."""

_KEPT = (*MESH_AXES, "precision")


@dataclass(frozen=True, kw_only=True)
class TableRequest:
    """The model, batch and machine to plan for.

    Args:
        name: Of the model.
        model: It; it declares what is looked up.
        tables: All of them, updated by row-wise Adagrad.
        cluster: On what.
        global_batch: Examples in a step.
        constraints: What may be chosen: the memory, and a precision.

    Raises:
        InputError: A constraint that a plan with tables does not know.
    """

    name: str
    model: Model
    tables: tuple[Table, ...]
    cluster: Cluster
    global_batch: int
    constraints: Constraints = Constraints()

    def __post_init__(self) -> None:
        kept, devices = self.constraints.kept, self.cluster.num_devices
        if "data" in self.constraints.forbidden and devices > 1:
            raise InputError(
                f"'data' is forbidden, but with tables all {devices} devices are "
                "replicas of the model; leave it out, or plan for 1 device",
                key="plan.data_forbidden",
            )
        for key, value in kept.items():
            if key not in _KEPT or (key in MESH_AXES and key != "data" and value > 1):
                raise InputError(
                    f"{key}={value} is kept, but plans with tables lay the model over "
                    "data alone, and the tables over all devices; leave it out",
                    key="plan.not_with_tables",
                )

    @property
    def noun(self) -> str:
        """Name of the examples of a batch."""
        return "examples"

    @property
    def note(self) -> str:
        """Nothing is left out that is known."""
        return ""

    @property
    def heading(self) -> str:
        """The model and the machine, in a line."""
        rows = sum(table.rows for table in self.tables)
        values = sum(table.rows * table.dim for table in self.tables)
        return (
            f"{self.name}: {self.model.num_parameters / 1e6:.3g} M parameters beside "
            f"{len(self.tables)} tables of {rows:,} rows "
            f"({gigabytes(_VALUE_BYTES * values)}), on {self.cluster.text}, "
            f"{self.global_batch:,} examples a step"
        )

    @property
    def capacity_bytes(self) -> float:
        """Bytes of a device that a plan may fill."""
        return self.constraints.capacity_bytes(self.cluster.device)

    def on(self, cluster: Cluster, global_batch: int) -> TableRequest:
        """The same on other devices."""
        return replace(self, cluster=cluster, global_batch=global_batch)

    def plans(self) -> Sequence[Plan]:
        """The one plan, if it fits.

        Raises:
            InputError: The devices do not divide the batch.
        """
        plan, fits = self.kept_plan()
        return [plan] if fits else []

    def kept_plan(self) -> tuple[Plan, bool]:
        """The plan, and whether it fits.

        Raises:
            InputError: The devices do not divide the batch.
        """
        devices, kept = self.cluster.num_devices, self.constraints.kept
        if kept.get("data", devices) != devices:
            raise InputError(
                f"data={kept['data']} is kept on {devices} devices, but with tables "
                f"all of them are replicas; keep data={devices}",
                key="plan.data_not_all_devices",
            )
        if self.global_batch % devices:
            raise InputError(
                f"global_batch={self.global_batch} does not divide over {devices} "
                "devices; make it a multiple",
                key="batch.indivisible",
            )
        plan = self._plan(Layout(data=devices, precision=kept.get("precision", "fp32")))
        return plan, plan.memory.total_bytes <= self.capacity_bytes

    def _kernels(self, examples: int) -> tuple[Kernel, ...]:
        """Matmuls of the model's forward and backward."""
        params = jax.eval_shape(self.model.init, 0)
        batch = input_shapes(self.model.known_inputs, {BATCH_DIM: examples})

        def both(params: Any, batch: Any) -> Any:
            return loss(self.model, params, batch, Scope())

        traced = jax.make_jaxpr(jax.value_and_grad(both))(params, batch)
        return traced_kernels(operations(traced))

    def _plan(self, layout: Layout) -> Plan:
        step = self._step(layout)
        device, devices = self.cluster.device, self.cluster.num_devices
        inputs = step.tables.batch_inputs(self.model.known_inputs)
        batch = input_shapes(inputs, {BATCH_DIM: self.global_batch})
        placements, memory = step.placements, step.predicted_memory(batch)
        traffic = table_traffic(step.functions.stores, placements, self.global_batch)
        run = TableRun(
            cluster=self.cluster,
            layout=layout,
            global_batch=self.global_batch,
            placements=placements,
            traffic=traffic,
        )
        moved = sum(one.memory_bytes for one in traffic)
        compute_s = matmul_time.memory_s(device, moved + 2 * memory.temp_bytes)
        compute_s += sum(
            matmul_time.matmul_s(device, layout.precision, one.flops, one.num_bytes)
            for one in self._kernels(self.global_batch // devices)
        )
        parameters, link = self.model.num_parameters, run.link("data")
        waits = sum(one.sent_s(devices, link) for one in traffic)
        waits += all_reduce_s(_GRADIENT_BYTES * parameters, devices, link)
        exposed_s = {"data": waits} if devices > 1 else {}
        optimizer_s = matmul_time.memory_s(device, _UPDATE_BYTES * parameters)
        busy_s = compute_s + optimizer_s + sum(exposed_s.values())
        time = StepTime(
            compute_s=compute_s,
            bubble_s=0.0,
            exposed_s=exposed_s,
            optimizer_s=optimizer_s,
            straggler_s=busy_s * straggler_fraction(self.cluster),
            host_s=0.0,
        )
        flops = sum(one.flops for one in self._kernels(1))
        return table_plan(run, memory=memory, time=time, flops=flops)

    def _step(self, layout: Layout) -> TableStep:
        optimizer = optax.adam(1e-3)
        dense = make_train_step(self.model, optimizer, layout, mesh=absent_mesh(layout))
        tables = embedding_tables(list(self.tables), RowwiseAdagrad(0.01))
        return with_tables(dense, tables)
