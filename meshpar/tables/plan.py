"""What the planner expects of a step with tables.

The model lies on every device, the tables over all of them. Nothing hides what is sent;
temporaries are written and read once, matmuls take what they take elsewhere.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshpar.hardware import device as matmul_time
from meshpar.layout import Layout
from meshpar.planner.cost.estimate import gigabytes, milliseconds
from meshpar.planner.cost.step_time import StepTime
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.link import Link
from meshpar.planner.other_plan import exposed_lines, fits, mfu_of, shared_json
from meshpar.tables.memory import TableMemory
from meshpar.tables.placement import Placements
from meshpar.tables.traffic import TableTraffic


@dataclass(frozen=True, kw_only=True)
class TableRun:
    """A model with tables on a cluster.

    Args:
        cluster, layout: Where, how.
        global_batch: Examples in a step.
        placements: Of the tables.
    """

    cluster: Cluster
    layout: Layout
    global_batch: int
    placements: Placements

    def link(self, *mesh_axes: str) -> Link:
        """What they communicate over."""
        return self.cluster.link(self.layout, *mesh_axes)


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """What the planner expects of a step with tables.

    Args:
        run: What was asked.
        memory: Of the fullest device.
        time: Where the step's time goes.
        traffic: What tables move, by `dim`.
        flops: Of the model, for an example, forward and backward.
    """

    run: TableRun
    memory: TableMemory
    time: StepTime
    traffic: tuple[TableTraffic, ...]
    flops: float

    @property
    def step_s(self) -> float:
        """Time of one step."""
        return self.time.step_s

    @property
    def mfu(self) -> float:
        """Of the devices' peak."""
        return mfu_of(self)

    @property
    def model_flops(self) -> float:
        """FLOPs of the model's matmuls of one step."""
        return self.flops * self.run.global_batch

    @property
    def layout_in_words(self) -> str:
        """The layout, and the fullest device's share of the tables."""
        uneven = self.run.placements.imbalance
        return (
            f"{self.run.layout}; fullest over mean {uneven.table_bytes:.2f} of bytes, "
            f"{uneven.lookups:.2f} of lookups"
        )

    @property
    def how_to_run(self) -> str:
        """The call that trains under it."""
        layout = str(self.run.layout)
        return (
            "meshpar.tables.with_tables(meshpar.make_train_step(model, optimizer, "
            f"{layout!r}), tables)"
        )

    @property
    def lines(self) -> list[str]:
        """What people read: memory, time, and what waits."""
        memory, time, device = self.memory, self.time, self.run.cluster.device
        verdict = "fits" if fits(self) else "does not fit"
        moved = sum(one.memory_bytes for one in self.traffic)
        loads = self.run.placements.loads
        return [
            f"layout {self.layout_in_words}",
            f"memory {gigabytes(memory.total_bytes)} of "
            f"{gigabytes(device.memory_bytes)}: {verdict}",
            f"  tables {gigabytes(memory.table_bytes)}, model "
            f"{gigabytes(memory.model_bytes)}, batch {gigabytes(memory.batch_bytes)}, "
            f"temporaries {gigabytes(memory.temp_bytes)}",
            f"step {milliseconds(self.step_s)}, MFU {self.mfu:.1%}: computing "
            f"{milliseconds(time.compute_s)}, of which tables' rows "
            f"{milliseconds(matmul_time.memory_s(device, moved))}, optimizer "
            f"{milliseconds(time.optimizer_s)}",
            f"  most lookups {max(load.lookups for load in loads):.2f} an example",
            *exposed_lines(self),
        ]

    def why_exposed(self, mesh_axis: str) -> str:
        """What waits for a mesh axis."""
        rows = sum(one.exchanged_rows for one in self.traffic)
        return (
            f"all-to-alls of {rows:,.0f} rows a device, there and back, and the "
            "model's gradients"
        )

    def as_json(self) -> dict[str, Any]:
        """One of the `plans` of `meshpar plan --json`."""
        memory = self.memory
        return {
            **shared_json(self),
            "memory": {**asdict(memory), "total_bytes": memory.total_bytes},
            "tables": [
                {
                    "table": one.table.name,
                    "rows": one.table.rows,
                    "placement": one.kind,
                    "device": one.device,
                }
                for one in self.run.placements.placed
            ],
            "loads": [
                {"table_bytes": round(load.table_bytes), "lookups": load.lookups}
                for load in self.run.placements.loads
            ],
        }
