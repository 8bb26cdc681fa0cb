"""Memory and time that the planner expects of a step with tables.

The model lies on every device, the tables over all of them. Nothing hides what is sent;
temporaries are written and read once, matmuls take what they take elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshpar.hardware import device as matmul_time
from meshpar.layout import Layout
from meshpar.planner.cost.step_time import StepTime, straggler_fraction
from meshpar.planner.machine.cluster import Cluster, Link
from meshpar.planner.machine.collective_cost import all_reduce_s
from meshpar.planner.plan import Plan, gigabytes, milliseconds
from meshpar.planner.workload.volumes import Kernel
from meshpar.tables.memory import TableMemory
from meshpar.tables.placement import Placements
from meshpar.tables.traffic import TableTraffic

_VALUE_BYTES, _GRADIENT_BYTES, _UPDATE_BYTES = 4, 4, 28
"""Bytes of a value, of a parameter's gradient, and moved by Adam's update of it."""


@dataclass(frozen=True, kw_only=True)
class TableRun:
    """A model with tables on a cluster.

    Args:
        name: Name of the model.
        cluster, layout: Machine and layout.
        global_batch: Examples in a step.
        num_parameters: Parameters of the model besides its tables.
        kernels: Matmuls of a device's examples, forward and backward.
        example_flops: FLOPs of the model for one example, forward and backward.
        temp_bytes: Bytes of a device's temporaries.
        placements: Placements of the tables.
        traffic: Bytes that tables move, by `dim`.
    """

    name: str
    cluster: Cluster
    layout: Layout
    global_batch: int
    num_parameters: int
    kernels: tuple[Kernel, ...]
    example_flops: float
    temp_bytes: float
    placements: Placements
    traffic: tuple[TableTraffic, ...]

    def link(self, *mesh_axes: str) -> Link:
        """Return the link that collectives over these mesh axes run on."""
        return self.cluster.link(self.layout, *mesh_axes)

    @property
    def heading(self) -> str:
        """The model and the machine, in a line."""
        tables = [one.table for one in self.placements.placed]
        rows = sum(table.rows for table in tables)
        values = sum(table.rows * table.dim for table in tables)
        return (
            f"{self.name}: {self.num_parameters / 1e6:.3g} M parameters and "
            f"{len(tables)} tables of {rows:,} rows "
            f"({gigabytes(_VALUE_BYTES * values)}), on {self.cluster.text}, "
            f"{self.global_batch:,} examples a step"
        )

    @property
    def layout_text(self) -> str:
        """The layout, and how unevenly devices share the tables."""
        uneven = self.placements.imbalance
        return (
            f"{self.layout}; fullest over mean {uneven.table_bytes:.2f} of bytes, "
            f"{uneven.lookups:.2f} of lookups"
        )

    @property
    def share(self) -> str:
        """Part of the batch on a device, in words."""
        return f"{self.global_batch // self.layout.batch_shards:,} examples on a device"

    @property
    def notes(self) -> tuple[str, ...]:
        """Lookups of the busiest device, and the time of tables' rows."""
        most = max(load.lookups for load in self.placements.loads)
        rows_s = matmul_time.memory_s(self.cluster.device, self.moved_bytes)
        return (
            f"most lookups of a device {most:.2f} an example; reading and writing "
            f"tables' rows takes {milliseconds(rows_s)}",
        )

    @property
    def moved_bytes(self) -> float:
        """Bytes of tables' rows that a device reads and writes in a step."""
        return sum(one.memory_bytes for one in self.traffic)

    @property
    def examples(self) -> tuple[int, str]:
        """Number of examples of a step."""
        return self.global_batch, "examples"

    @property
    def model_flops(self) -> float:
        """FLOPs of one step."""
        return self.example_flops * self.global_batch

    @property
    def python_call(self) -> str:
        """Call that makes the training step."""
        return (
            "meshpar.tables.with_tables(meshpar.make_train_step(model, optimizer, "
            f"{str(self.layout)!r}), tables)"
        )

    def why_exposed(self, _: str) -> str:
        """Return the reason why the step waits for the mesh axis `data`."""
        rows = sum(one.exchanged_rows for one in self.traffic)
        return (
            f"all-to-alls of {rows:,.0f} rows a device, there and back, and the "
            "model's gradients"
        )

    def as_json(self) -> dict[str, Any]:
        """Return entries of a plan's JSON that only models with tables have."""
        return {
            "tables": [
                {
                    "table": one.table.name,
                    "rows": one.table.rows,
                    "placement": one.kind,
                    "device": one.device,
                }
                for one in self.placements.placed
            ],
            "loads": [
                {"table_bytes": round(load.table_bytes), "lookups": load.lookups}
                for load in self.placements.loads
            ],
        }


def table_time(run: TableRun) -> StepTime:
    """Return the time of a step, by what it is spent on."""
    device, devices = run.cluster.device, run.cluster.num_devices
    compute_s = matmul_time.memory_s(device, run.moved_bytes + 2 * run.temp_bytes)
    compute_s += sum(
        matmul_time.matmul_s(device, run.layout.precision, one.flops, one.num_bytes)
        for one in run.kernels
    )
    link = run.link("data")
    waits = sum(one.sent_s(devices, link) for one in run.traffic)
    waits += all_reduce_s(_GRADIENT_BYTES * run.num_parameters, devices, link)
    exposed_s = {"data": waits} if devices > 1 else {}
    optimizer_s = matmul_time.memory_s(device, _UPDATE_BYTES * run.num_parameters)
    busy_s = compute_s + optimizer_s + sum(exposed_s.values())
    return StepTime(
        compute_s=compute_s,
        bubble_s=0.0,
        exposed_s=exposed_s,
        optimizer_s=optimizer_s,
        straggler_s=busy_s * straggler_fraction(run.cluster),
        host_s=0.0,
    )


def table_plan(run: TableRun, memory: TableMemory) -> Plan[TableRun, TableMemory]:
    """Return the plan of a step with tables."""
    return Plan(run=run, memory=memory, timer=table_time)
