"""Plans of a model with tables: what is asked, and the plan of so many devices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax

from meshpar.audit.kernels import traced_kernels
from meshpar.errors import InputError
from meshpar.layout import MESH_AXES, Layout
from meshpar.machine.mesh import absent_mesh
from meshpar.model.contract import Model
from meshpar.model.inputs import BATCH_DIM, Input, input_shapes
from meshpar.model.scope import Scope
from meshpar.model.single import loss
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.plan import Plan
from meshpar.planner.search.result import SearchResult, ranked
from meshpar.planner.search.space import Constraints
from meshpar.planner.workload.volumes import Kernel
from meshpar.tables.optimizers import RowwiseAdagrad
from meshpar.tables.plan import TableRun, table_plan
from meshpar.tables.step import with_tables
from meshpar.tables.table import Table
from meshpar.tables.tables import embedding_tables
from meshpar.tables.traffic import table_traffic
from meshpar.trace.operations import operations
from meshpar.train.make_step import make_train_step

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

    def search(self, *, num_plans: int = 1) -> SearchResult:
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
