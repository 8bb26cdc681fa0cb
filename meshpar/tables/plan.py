"""Memory and time that the planner expects of a step with tables.

The model lies on every device, the tables over all of them. Nothing hides what is sent;
temporaries are written and read once, matmuls take what they take elsewhere.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from meshpar.hardware import device as matmul_time
from meshpar.layout import Layout
from meshpar.planner.cost.estimate import milliseconds
from meshpar.planner.cost.step_time import StepTime
from meshpar.planner.machine.cluster import Cluster, Link
from meshpar.planner.plan import Plan
from meshpar.tables.memory import TableMemory
from meshpar.tables.placement import Placements
from meshpar.tables.traffic import TableTraffic


@dataclass(frozen=True, kw_only=True)
class TableRun:
    """A model with tables on a cluster.

    Args:
        cluster, layout: Machine and layout.
        global_batch: Examples in a step.
        placements: Placements of the tables.
        traffic: Bytes that tables move, by `dim`.
    """

    cluster: Cluster
    layout: Layout
    global_batch: int
    placements: Placements
    traffic: tuple[TableTraffic, ...]

    def link(self, *mesh_axes: str) -> Link:
        """Return the link that collectives over these mesh axes run on."""
        return self.cluster.link(self.layout, *mesh_axes)


def table_plan(
    run: TableRun, *, memory: TableMemory, time: StepTime, flops: float
) -> Plan:
    """Return the plan of a step with tables.

    Args:
        run: The model on a cluster, with the traffic of its tables.
        memory: Bytes of the fullest device.
        time: Seconds of the step.
        flops: FLOPs of the model for one example, forward and backward.
    """
    placements, loads = run.placements, run.placements.loads
    uneven = placements.imbalance
    moved = sum(one.memory_bytes for one in run.traffic)
    rows = sum(one.exchanged_rows for one in run.traffic)
    rows_s = matmul_time.memory_s(run.cluster.device, moved)
    return Plan(
        run=run,
        memory=memory,
        time=time,
        model_flops=flops * run.global_batch,
        layout_text=f"{run.layout}; fullest over mean {uneven.table_bytes:.2f} of "
        f"bytes, {uneven.lookups:.2f} of lookups",
        how_to_run="meshpar.tables.with_tables(meshpar.make_train_step(model, "
        f"optimizer, {str(run.layout)!r}), tables)",
        memory_parts={
            "tables": memory.table_bytes,
            "model": memory.model_bytes,
            "batch": memory.batch_bytes,
            "temporaries": memory.temp_bytes,
        },
        reasons={
            "data": f"all-to-alls of {rows:,.0f} rows a device, there and back, and "
            "the model's gradients"
        },
        compute_note=f", of which tables' rows {milliseconds(rows_s)}",
        load=f"most lookups {max(load.lookups for load in loads):.2f} an example",
        details={
            "memory": {**asdict(memory), "total_bytes": memory.total_bytes},
            "tables": [
                {
                    "table": one.table.name,
                    "rows": one.table.rows,
                    "placement": one.kind,
                    "device": one.device,
                }
                for one in placements.placed
            ],
            "loads": [
                {"table_bytes": round(load.table_bytes), "lookups": load.lookups}
                for load in loads
            ],
        },
    )
