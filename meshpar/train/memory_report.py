"""What a training step's memory goes to: each part by formula, beside the compiler.

States have formulas alone: values, bytes of one, and what ZeRO and the rules split them
over (Rajbhandari et al. 2020, section 3). Temporaries are the planner's arithmetic over
the model's own traced blocks (`meshpar.planner.cost.memory`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.audit.block_trace import traced_workload
from meshpar.audit.memory import MemoryUse
from meshpar.audit.report import audit
from meshpar.audit.space_trace import traced_space
from meshpar.hardware.devices import DEVICES
from meshpar.layout import STAGE_REMATS
from meshpar.mesh import platform_of
from meshpar.model.inputs import open_size
from meshpar.model.parameter import is_parameter
from meshpar.model.token_order import TokenOrder
from meshpar.parallel.space import has_space, space_degree
from meshpar.parallel.zero import Stored, is_stored
from meshpar.planner.cost.memory import Memory, memory_of
from meshpar.planner.cost.run import Run
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.execution import MESHPAR
from meshpar.planner.workload.activations import kept_bytes, stage_input_bytes
from meshpar.rules.rules import spec_axes
from meshpar.schedules import tick_table
from meshpar.train.local_steps.state import WithOuter
from meshpar.train.precision import Mastered, inner_state
from meshpar.train.step import Batch, TrainStep, batch_structs


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one kind of array takes on one device.

    Args:
        name: What it is.
        formula_bytes: By arithmetic.
        compiled_bytes: Of the compiled program, where the compiler tells it apart.
        how: The formula in words.
        memory: `device` or `host`.
    """

    name: str
    formula_bytes: int
    compiled_bytes: int | None
    how: str
    memory: str = "device"


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """All parts, the states first; bytes are per device.

    Args:
        layout: The step's.
        parts: States, then temporaries.
        at_once_bytes: Of the temporaries, by formula, what is there together at most:
            the logits and a block's workspace are not.
        temp_bytes: Of the compiled program: what is no argument.
        peak_bytes: The most that it holds at once.
    """

    layout: str
    parts: tuple[Part, ...]
    at_once_bytes: int
    temp_bytes: int
    peak_bytes: int

    @property
    def formula_bytes(self) -> int:
        """States on the device, and the most of the temporaries there is at once."""
        states = (
            part.formula_bytes
            for part in self.parts
            if part.compiled_bytes is not None and part.memory == "device"
        )
        return sum(states) + self.at_once_bytes

    @property
    def difference(self) -> float:
        """(formula - compiled peak) / compiled peak."""
        return self.formula_bytes / self.peak_bytes - 1

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        sums = {"formula_bytes": self.formula_bytes, "difference": self.difference}
        return {**asdict(self), **sums}

    def __str__(self) -> str:
        rows = [
            (part.name, part.formula_bytes, part.compiled_bytes, part.how)
            for part in self.parts
        ]
        at_once = "the most of them at once"
        rows += [
            ("temporaries", self.at_once_bytes, self.temp_bytes, at_once),
            ("peak", self.formula_bytes, self.peak_bytes, f"{self.difference:+.1%}"),
        ]
        lines = [f"layout {self.layout}; MiB per device: formula, compiled"]
        for name, formula, compiled, how in rows:
            found = "-" if compiled is None else f"{compiled / 2**20:.2f}"
            lines.append(f"{name:20}{formula / 2**20:12.2f}{found:>12}  {how}")
        return "\n".join(lines)


def memory_report(
    step: TrainStep, batch: Batch, *, target: str | None = None
) -> MemoryReport:
    """Every byte of a step, by formula and from the compiled program.

    Args:
        step: From `make_train_step`; on an `absent_mesh` too.
        batch: Arrays or their shapes, as `meshpar.audit` takes them.
        target: Absent hardware to compile for, such as `gpu:h100:1x8`.

    Raises:
        InputError: As for `meshpar.audit`.
    """
    report = audit(step, batch, target=target)
    if has_space(step.model_as_given):
        return _of_space(step, batch, report.compiled_memory)
    run, gradient_bytes = planned_run(step, batch), _gradient_bytes(step)
    memory = memory_of(run)
    late_bytes = gradient_bytes if memory.late_bytes else 0
    memory = replace(memory, gradient_bytes=gradient_bytes, late_bytes=late_bytes)
    return MemoryReport(
        layout=str(step.layout),
        parts=(*_states(step), *_temporaries(step, run, memory)),
        at_once_bytes=round(memory.temporary_bytes),
        temp_bytes=report.compiled_memory.temp_bytes,
        peak_bytes=report.compiled_memory.peak_bytes,
    )


def estimated_bytes(step: TrainStep, batch: Batch) -> tuple[float, float]:
    """The states and the most of the temporaries of a device, by arithmetic alone.

    Nothing is compiled: the formulas of `memory_report`.

    Args:
        step: From `make_train_step`; on an `absent_mesh` too.
        batch: Arrays or their shapes.
    """
    parts = [part for part in _states(step) if part.memory == "device"]
    if has_space(step.model_as_given):
        parts.append(_batch_part(step, batch))
        at_once = traced_space(step, batch).temporary_bytes(_space_degree(step))
        return sum(part.formula_bytes for part in parts), at_once
    gradient_bytes = _gradient_bytes(step)
    memory = memory_of(planned_run(step, batch))
    late_bytes = gradient_bytes if memory.late_bytes else 0
    memory = replace(memory, gradient_bytes=gradient_bytes, late_bytes=late_bytes)
    return sum(part.formula_bytes for part in parts), memory.temporary_bytes


def _of_space(step: TrainStep, batch: Batch, compiled: MemoryUse) -> MemoryReport:
    """Of a model of volumes, whose arrays are counted in a trace of the whole step."""
    found, degree = traced_space(step, batch), _space_degree(step)
    rest = "gradients, and parameters as they are used"
    parts = (
        ("volumes", found.activation_bytes(degree), f"over {degree} devices"),
        ("halos", found.received_bytes, "of one convolution, the largest"),
        ("the rest", found.other_bytes, rest),
    )
    temporaries = (
        Part(name=name, formula_bytes=round(size), compiled_bytes=None, how=how)
        for name, size, how in parts
    )
    return MemoryReport(
        layout=str(step.layout),
        parts=(*_states(step), _batch_part(step, batch), *temporaries),
        at_once_bytes=round(found.temporary_bytes(degree)),
        temp_bytes=compiled.temp_bytes,
        peak_bytes=compiled.peak_bytes,
    )


def _batch_part(step: TrainStep, batch: Batch) -> Part:
    shapes = batch_structs(batch)
    lie = {
        name: step.placement.batch_sharding(name, one) for name, one in batch.items()
    }
    size = _local_bytes(shapes, lie)
    how = "examples over the batch axes, volumes in parts"
    return Part(name="batch", formula_bytes=size, compiled_bytes=size, how=how)


def _space_degree(step: TrainStep) -> int:
    return space_degree(step.model_as_given, step.layout, step.rules)


def _states(step: TrainStep) -> list[Part]:
    """Parameters, master copy and optimizer state: formula and arguments."""
    shapes, shardings = step.state_shapes, step.shardings
    placed = jax.tree.leaves(step.placement.stored, is_leaf=is_stored)
    parameters = jax.tree.leaves(step.model.parameters, is_leaf=is_parameter)
    sizes = [math.prod(parameter.stacked_shape) for parameter in parameters]

    def by_formula(spec: Callable[[Stored], PartitionSpec], value_bytes: int) -> int:
        return sum(
            size * value_bytes // _degree(step, spec(stored))
            for size, stored in zip(sizes, placed, strict=True)
        )

    value_bytes = jax.tree.leaves(shapes.params)[0].dtype.itemsize
    inner, inner_shardings = map(inner_state, (shapes.opt_state, shardings.opt_state))
    common = None
    if isinstance(inner, WithOuter):
        common = (inner, inner_shardings)
        inner, inner_shardings = inner.inner, inner_shardings.inner
    replicas = step.layout.data if common else 1
    per_value = _values_per_parameter(inner, sum(sizes) * replicas)
    parts = [
        Part(
            name="parameters",
            formula_bytes=by_formula(lambda stored: stored.spec, value_bytes),
            compiled_bytes=_local_bytes(shapes.params, shardings.params),
            how=f"{value_bytes} bytes a value, split with zero=3",
        ),
        Part(
            name="optimizer",
            formula_bytes=round(
                by_formula(lambda stored: stored.state_spec, 4) * per_value
            ),
            compiled_bytes=_local_bytes(inner, inner_shardings),
            how=f"{per_value:.3g} fp32 values for each, split with zero=1, 2, 3",
            memory=step.layout.optimizer_memory,
        ),
    ]
    if common:
        found, more = zip(*((one.start, one.outer) for one in common), strict=True)
        beside = _values_per_parameter(more[0], sum(sizes))
        of_each = by_formula(lambda stored: stored.state_spec, 4)
        parts.append(
            Part(
                name="outer optimizer",
                formula_bytes=round(of_each * (1 + beside)),
                compiled_bytes=_local_bytes(*found) + _local_bytes(*more),
                how=f"the common parameters and {beside:.3g} values for each, fp32",
            )
        )
    if isinstance(shapes.opt_state, Mastered):
        parts.append(
            Part(
                name="master copy",
                formula_bytes=by_formula(lambda stored: stored.state_spec, 4),
                compiled_bytes=_local_bytes(
                    shapes.opt_state.master, shardings.opt_state.master
                ),
                how="4 bytes a value, split as the optimizer state",
                memory=step.layout.optimizer_memory,
            )
        )
    return parts


def _gradient_bytes(step: TrainStep) -> int:
    value_bytes = jnp.dtype(step.placement.gradient_dtype).itemsize
    return sum(
        math.prod(parameter.stacked_shape)
        * value_bytes
        // _degree(step, stored.gradient_spec)
        for parameter, stored in zip(
            jax.tree.leaves(step.model.parameters, is_leaf=is_parameter),
            jax.tree.leaves(step.placement.stored, is_leaf=is_stored),
            strict=True,
        )
    )


def _temporaries(step: TrainStep, run: Run, memory: Memory) -> list[Part]:
    dtype = jnp.dtype(step.placement.gradient_dtype)
    if step.layout.remat in STAGE_REMATS:
        kept, what = stage_input_bytes(run), "stage"
    else:
        kept, what = kept_bytes(run, moe=False), "block"
    held = (
        f"{kept / 2**20:.2f} MiB a {what} with remat={step.layout.remat}, microbatches "
        f"in flight: {memory.in_flight:g}"
    )
    parts = (
        ("gradients", memory.gradient_bytes, f"{dtype}, added up in place"),
        ("activations", memory.activation_bytes, held),
        ("gathered weights", memory.gathered_bytes, "whole or cast, for use"),
        ("logits", memory.logit_bytes, "and their gradient, of one microbatch"),
        ("workspace", memory.workspace_bytes, "of one block's backward"),
        ("gradients of the ends", memory.ends_bytes, "whole, once the blocks are done"),
        ("fetched states", memory.fetched_bytes, "from the host, while they change"),
    )
    return [
        Part(name=name, formula_bytes=round(size), compiled_bytes=None, how=how)
        for name, size, how in parts
        if size or name != "fetched states"
    ]


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


def _degree(step: TrainStep, spec: PartitionSpec) -> int:
    return math.prod(step.mesh.shape[axis] for axis in spec_axes(spec))


def _values_per_parameter(inner: Any, num_values: int) -> float:
    """fp32 values of optimizer state for each value of a parameter."""
    sizes = (
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(inner)
    )
    return sum(sizes) / 4 / num_values


def _local_bytes(shapes: Any, shardings: Any) -> int:
    def of(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> int:
        return math.prod(sharding.shard_shape(shape.shape)) * shape.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(of, shapes, shardings)))
