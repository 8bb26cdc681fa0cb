"""Plans of a model with tables: the model on every device, the tables over all of them.

On a device with `b` examples of `B`, `L` ids an example, rows of `d` values in fp32 and
`E` rows exchanged in a round (`meshpar.tables.exchange`), a step takes

    looking up    4 d bytes read and written for each row that the fullest device holds
                  of those that all examples ask for, B * (its lookups an example)
    updating      4 d bytes read, and 8 d + 8 read and written, for each of them
    bags          4 d bytes read for each of its ids, forward and backward, b * L
    all-to-all    two of 4 E bytes of ids, two of 4 d E bytes of rows

and the model's matmuls and gradients. Assumed: every id is another one, so that none is
sent once for several; optimizer and table rows move at the memory's bandwidth, and
nothing is counted for making ids unique; nothing hides what is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar.audit.kernels import kernels_of
from meshpar.audit.traced import operations
from meshpar.errors import InputError
from meshpar.hardware import matmul_time
from meshpar.layout import MESH_AXES, Layout
from meshpar.mesh import absent_mesh
from meshpar.model.contract import Model
from meshpar.model.scope import Scope
from meshpar.model.single import loss
from meshpar.planner.cost.estimate import gigabytes, milliseconds
from meshpar.planner.cost.step_time import StepTime
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.collective_cost import all_reduce_s, all_to_all_s
from meshpar.planner.machine.link import Link
from meshpar.planner.search.constraints import Constraints
from meshpar.planner.workload.volume import Kernel
from meshpar.tables.exchange import Exchange
from meshpar.tables.memory import TableMemory
from meshpar.tables.optimizers import RowwiseAdagrad
from meshpar.tables.placement import Placements
from meshpar.tables.step import TableStep, with_tables
from meshpar.tables.stores import SPREAD, Store
from meshpar.tables.table import Table
from meshpar.tables.tables import embedding_tables
from meshpar.train.make_step import make_train_step

_VALUE_BYTES, _ID_BYTES = 4, 4
_GRADIENT_BYTES, _UPDATE_BYTES = 4, 28
_KEPT = (*MESH_AXES, "precision")


@dataclass(frozen=True, kw_only=True)
class TableTraffic:
    """Rows that a step moves, on the device that has most to do.

    Args:
        dim: Values of a row.
        held_rows: Rows of its own that all examples ask for.
        asked_rows: Rows that its own examples ask for.
        exchanged_rows: That it sends and gets in a round; 0 on one device.
    """

    dim: int
    held_rows: float
    asked_rows: float
    exchanged_rows: float

    @property
    def memory_bytes(self) -> float:
        """Read and written of its memory; this module has the sum."""
        row = _VALUE_BYTES * self.dim
        return self.held_rows * (2 * row + 3 * row + 8) + self.asked_rows * 2 * row

    def sent_s(self, num_devices: int, link: Link) -> float:
        """Of two all-to-alls of ids and two of rows."""
        ids = _ID_BYTES * self.exchanged_rows
        rows = _VALUE_BYTES * self.dim * self.exchanged_rows
        return 2 * sum(all_to_all_s(one, num_devices, link) for one in (ids, rows))


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
        """FLOPs of the model's matmuls over what all devices could do then."""
        run = self.run
        peak = run.cluster.device.peak_flops[run.layout.precision]
        done = self.flops * run.global_batch
        return done / (peak * run.cluster.num_devices * self.step_s)

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
        verdict = "fits" if memory.total_bytes <= device.usable_bytes else "too large"
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
            *(
                f"  exposed on {axis} ({self.run.link(axis).name}) "
                f"{milliseconds(seconds)}: {self.why_exposed(axis)}"
                for axis, seconds in time.exposed_s.items()
            ),
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
        memory, time = self.memory, self.time
        return {
            "layout": str(self.run.layout),
            "step_s": self.step_s,
            "mfu": self.mfu,
            "fits": memory.total_bytes <= self.run.cluster.device.usable_bytes,
            "memory": {
                "model_bytes": memory.model_bytes,
                "table_bytes": memory.table_bytes,
                "batch_bytes": memory.batch_bytes,
                "temp_bytes": memory.temp_bytes,
                "total_bytes": memory.total_bytes,
            },
            "time": {
                "compute_s": time.compute_s,
                "exposed": dict(time.exposed_s),
                "optimizer_s": time.optimizer_s,
                "straggler_s": time.straggler_s,
            },
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


@dataclass(frozen=True, kw_only=True)
class TableRequest:
    """What is to be laid out.

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
        kept = self.constraints.kept
        for key, value in kept.items():
            if key not in _KEPT or (key in MESH_AXES and key != "data" and value > 1):
                raise InputError(
                    f"{key}={value} is kept, but plans with tables lay the model over "
                    "data alone, and the tables over all devices; leave it out"
                )

    @property
    def noun(self) -> str:
        """What its examples are called."""
        return "examples"

    @property
    def what(self) -> str:
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
        """What a plan may fill of a device."""
        own = self.cluster.device.usable_bytes
        return min(own, self.constraints.max_memory_bytes or own)

    def on(self, cluster: Cluster, global_batch: int) -> TableRequest:
        """The same on other devices."""
        return replace(self, cluster=cluster, global_batch=global_batch)

    def plans(self) -> Sequence[TablePlan]:
        """The one plan, if it fits.

        Raises:
            InputError: The devices do not divide the batch.
        """
        plan, fits = self.of_layout()
        return [plan] if fits else []

    def of_layout(self) -> tuple[TablePlan, bool]:
        """The plan, and whether it fits.

        Raises:
            InputError: The devices do not divide the batch.
        """
        devices, kept = self.cluster.num_devices, self.constraints.kept
        if kept.get("data", devices) != devices:
            raise InputError(
                f"data={kept['data']} is kept on {devices} devices, but with tables "
                f"all of them are replicas; keep data={devices}"
            )
        if self.global_batch % devices:
            raise InputError(
                f"global_batch={self.global_batch} does not divide over {devices} "
                "devices; make it a multiple"
            )
        plan = self._plan(Layout(data=devices, precision=kept.get("precision", "fp32")))
        return plan, plan.memory.total_bytes <= self.capacity_bytes

    @cached_property
    def _of_example(self) -> tuple[Kernel, ...]:
        return self._kernels(1)

    def _kernels(self, examples: int) -> tuple[Kernel, ...]:
        """Matmuls of the model's forward and backward."""
        params = jax.eval_shape(self.model.init, 0)
        batch = {
            name: jax.ShapeDtypeStruct((examples, *one.sizes[1:]), one.dtype)
            for name, one in (self.model.inputs or {}).items()
            if not one.optional
        }

        def both(params: Any, batch: Any) -> Any:
            return loss(self.model, params, batch, Scope())

        traced = jax.make_jaxpr(jax.value_and_grad(both))(params, batch)
        return kernels_of(operations(traced, [None] * len(traced.in_avals)))

    def _plan(self, layout: Layout) -> TablePlan:
        step = self._step(layout)
        device, devices = self.cluster.device, self.cluster.num_devices
        placements, memory = step.placements, step.predicted_memory(self._batch())
        run = TableRun(
            cluster=self.cluster,
            layout=layout,
            global_batch=self.global_batch,
            placements=placements,
        )
        traffic = _traffic(step.functions.stores, placements, self.global_batch)
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
        slowest = device.efficiency.spread * math.sqrt(2 * math.log(devices))
        time = StepTime(
            compute_s=compute_s,
            bubble_s=0.0,
            exposed_s=exposed_s,
            optimizer_s=optimizer_s,
            straggler_s=busy_s * slowest,
            host_s=0.0,
        )
        flops = sum(one.flops for one in self._of_example)
        return TablePlan(
            run=run, memory=memory, time=time, traffic=traffic, flops=flops
        )

    def _step(self, layout: Layout) -> TableStep:
        optimizer = optax.adam(1e-3)
        dense = make_train_step(self.model, optimizer, layout, mesh=absent_mesh(layout))
        tables = embedding_tables(list(self.tables), RowwiseAdagrad(0.01))
        return with_tables(dense, tables)

    def _batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a global batch: ids, and the model's other inputs."""
        examples = self.global_batch
        found = {
            feature: jax.ShapeDtypeStruct((examples, table.bag), np.int32)
            for table in self.tables
            for feature in table.features
        }
        looked_up = {table.into for table in self.tables}
        for name, one in (self.model.inputs or {}).items():
            if not one.optional and name not in looked_up:
                shape = (examples, *one.sizes[1:])
                found[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(one.dtype))
        return found


def _traffic(
    stores: Sequence[Store], placements: Placements, global_batch: int
) -> tuple[TableTraffic, ...]:
    """By `dim`: what the device that holds most of what is asked for moves."""
    devices = placements.num_devices
    most = max(range(devices), key=lambda at: placements.loads[at].lookups)
    examples = global_batch // devices
    found = []
    for dim in sorted({store.dim for store in stores}):
        placed = [one for one in placements.placed if one.table.dim == dim]
        held = sum(
            one.table.lookups
            * (float(one.device == most) if one.device is not None else 1 / devices)
            for one in placed
        )
        exchanged = sum(
            _exchanged(store, examples)
            for store in stores
            if store.dim == dim and devices > 1
        )
        asked = sum(one.table.lookups for one in placed)
        found.append(
            TableTraffic(
                dim=dim,
                held_rows=global_batch * held,
                asked_rows=examples * asked,
                exchanged_rows=exchanged,
            )
        )
    return tuple(found)


def _exchanged(store: Store, examples: int) -> float:
    """Rows of a store that a device sends in a round; replicas gather as many."""
    distinct = min(
        examples * sum(member.table.lookups for member in store.members),
        store.num_codes,
    )
    if store.kind != SPREAD:
        return float(distinct)
    return store.num_devices * float(
        Exchange.of(store, ("all",), examples, distinct).room
    )
