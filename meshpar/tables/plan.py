"""Plans of a model with tables: rows sent, memory and time of a step.

The model lies on every device, the tables over all of them. Nothing hides what is sent;
temporaries are written and read once, matmuls take what they take elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax

from meshpar.errors import InputError
from meshpar.hardware import device as matmul_time
from meshpar.layout import MESH_AXES, Layout
from meshpar.machine.mesh import absent_mesh
from meshpar.model.contract import Model
from meshpar.model.inputs import BATCH_DIM, Input, input_shapes
from meshpar.model.scope import Scope
from meshpar.model.tracing import loss
from meshpar.planner.cost.step_time import StepTime, straggler_fraction
from meshpar.planner.machine.cluster import Cluster, Link
from meshpar.planner.machine.collective_cost import all_reduce_s, all_to_all_s
from meshpar.planner.plan import Plan, gigabytes, milliseconds
from meshpar.planner.search.result import SearchResult, ranked
from meshpar.planner.search.space import Constraints
from meshpar.planner.volume_traces import traced_kernels
from meshpar.planner.workload.volumes import Kernel
from meshpar.tables.exchange import Exchange
from meshpar.tables.memory import TableMemory
from meshpar.tables.optimizers import RowwiseAdagrad
from meshpar.tables.placement import Placements
from meshpar.tables.step import with_tables
from meshpar.tables.stores import SPREAD, Store
from meshpar.tables.table import Table
from meshpar.tables.tables import embedding_tables
from meshpar.trace.operations import operations
from meshpar.train.make_step import make_train_step

_VALUE_BYTES, _ID_BYTES = 4, 4


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
        """Read and written of its memory; this module says of what."""
        row = _VALUE_BYTES * self.dim
        return self.held_rows * (2 * row + 3 * row + 8) + self.asked_rows * 2 * row

    def sent_s(self, num_devices: int, link: Link) -> float:
        """Bytes of two all-to-alls of ids and two of rows."""
        ids = _ID_BYTES * self.exchanged_rows
        rows = _VALUE_BYTES * self.dim * self.exchanged_rows
        return 2 * sum(all_to_all_s(one, num_devices, link) for one in (ids, rows))


def table_traffic(
    stores: Sequence[Store], placements: Placements, global_batch: int
) -> tuple[TableTraffic, ...]:
    """Return bytes by `dim` on the device that holds most of the rows asked for."""
    devices = placements.num_devices
    most = max(range(devices), key=lambda at: placements.loads[at].lookups)
    examples = global_batch // devices
    found = []
    for dim in sorted({store.dim for store in stores}):
        placed = [one for one in placements.placed if one.table.dim == dim]
        held = sum(one.table.lookups * one.share(most, devices) for one in placed)
        exchanged = 0.0  # Rows that a device sends in a round; replicas gather as many.
        for store in stores if devices > 1 else ():
            if store.dim == dim and store.kind != SPREAD:
                exchanged += store.distinct(examples)
            elif store.dim == dim:
                room = Exchange.for_examples(store, ("all",), examples).room
                exchanged += store.num_devices * float(room)
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
    def kind(self) -> str:
        """Kind of the model."""
        return "models with tables"

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


_KEPT = (*MESH_AXES, "precision")


def looked_up_input(model: Model) -> tuple[str, Input] | None:
    """Return the name and the input of looked up rows; None if there is none."""
    inputs = (model.inputs or {}).items()
    return next(((name, one) for name, one in inputs if one.has_gradient), None)


def feature_tables(
    name: str, into: str, looked_up: Input, rows: Sequence[int], bags: Sequence[int]
) -> tuple[Table, ...]:
    """Return a table for each feature of an input that is looked up.

    Args:
        name: Name of the model in errors.
        into: Name of the input.
        looked_up: The input.
        rows: Rows of each table, or of all.
        bags: Ids of an example in each table; empty for 1 each.

    Raises:
        InputError: There are not as many numbers of rows as features.
    """
    features, dim = looked_up.sizes[1] or 0, looked_up.sizes[2] or 0
    if len(rows) not in (1, features):
        raise InputError(
            f"--tables gives {len(rows)} numbers of rows, but {name} has {features} "
            "features; give one for each, or one for all",
            key="command.wrong_number_of_tables",
        )
    each = rows if len(rows) == features else [*rows] * features
    return tuple(
        Table(name=f"id{at}", rows=count, dim=dim, bag=bag, into=into)
        for at, (count, bag) in enumerate(
            zip(each, bags or (1,) * features, strict=True)
        )
    )


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

    noun, note = "examples", ""

    @property
    def capacity_bytes(self) -> float:
        """Bytes of a device that a plan may fill."""
        return self.constraints.capacity_bytes(self.cluster.device)

    def on(self, cluster: Cluster, global_batch: int) -> TableRequest:
        """The same on other devices."""
        return replace(self, cluster=cluster, global_batch=global_batch)

    def search(self, *, num_plans: int = 1, plans_only: bool = False) -> SearchResult:
        """Return the one plan, if it fits.

        Raises:
            InputError: The devices do not divide the batch.
        """
        started = time.perf_counter()
        plan, _ = self.kept_plan()
        return ranked([plan], self.capacity_bytes, num_plans, started)

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
        dense = make_train_step(
            self.model, optax.adam(1e-3), layout, mesh=absent_mesh(layout)
        )
        tables = embedding_tables(list(self.tables), RowwiseAdagrad(0.01))
        step = with_tables(dense, tables)
        inputs = step.tables.batch_inputs(self.model.known_inputs)
        batch = input_shapes(inputs, {BATCH_DIM: self.global_batch})
        placements, memory = step.placements, step.predicted_memory(batch)
        run = TableRun(
            name=self.name,
            cluster=self.cluster,
            layout=layout,
            global_batch=self.global_batch,
            num_parameters=self.model.num_parameters,
            kernels=self._kernels(self.global_batch // self.cluster.num_devices),
            example_flops=sum(one.flops for one in self._kernels(1)),
            temp_bytes=memory.temp_bytes,
            placements=placements,
            traffic=table_traffic(step.functions.stores, placements, self.global_batch),
        )
        return table_plan(run, memory)
