"""Memory of a training step: each part by formula, and the compiler's numbers.

Temporaries are the planner's arithmetic over the model's own traced blocks
(`meshpar.planner.cost.memory`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.audit.memory import MemoryUse
from meshpar.audit.report import audit
from meshpar.audit.target import Target
from meshpar.errors import InputError
from meshpar.html import element, stacked_bar, table
from meshpar.layout import STAGE_REMATS
from meshpar.model.parameter import is_parameter
from meshpar.parallel.grids.space import has_space, space_degree
from meshpar.parallel.zero import Stored
from meshpar.planner.cost.activations import kept_bytes, stage_input_bytes
from meshpar.planner.cost.memory import Memory, fullest_memory
from meshpar.planner.cost.run import Run
from meshpar.planner.from_model import planned_run
from meshpar.planner.volume_traces import traced_space
from meshpar.rules.rules import spec_axes
from meshpar.train.batch_placement import batch_structs
from meshpar.train.local_steps import WithOuter
from meshpar.train.optimizer_state import Mastered, inner_state
from meshpar.train.step import Batch, TrainStep


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
        on_device = (
            part.formula_bytes
            for part in self.parts
            if part.compiled_bytes is not None and part.memory == "device"
        )
        return sum(on_device) + self.at_once_bytes

    @property
    def difference(self) -> float:
        """(formula - compiled peak) / compiled peak."""
        return self.formula_bytes / self.peak_bytes - 1

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        sums = {"formula_bytes": self.formula_bytes, "difference": self.difference}
        return {**asdict(self), **sums}

    def __str__(self) -> str:
        lines = [f"layout {self.layout}; MiB per device: formula, compiled"]
        lines += [
            f"{name:20}{formula:>12}{compiled:>12}  {how}"
            for name, formula, compiled, how in self._rows()
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        on_device = {
            part.name: float(part.formula_bytes)
            for part in self.parts
            if part.compiled_bytes is not None and part.memory == "device"
        }
        sizes = {**on_device, "temporaries": float(self.at_once_bytes)}
        bar = stacked_bar(sizes, lambda size: f"{size / 2**20:.2f} MiB")
        head = ["part", "MiB by formula", "MiB compiled", "how"]
        title = f"Memory of a device under {self.layout}"
        return element(title, [bar, table(head, self._rows())])

    def _rows(self) -> list[tuple[str, str, str, str]]:
        """Return name, formula and compiled size in MiB, and how, of each part."""
        rows = [
            (part.name, part.formula_bytes, part.compiled_bytes, part.how)
            for part in self.parts
        ]
        at_once = "the most of them at once"
        rows += [
            ("temporaries", self.at_once_bytes, self.temp_bytes, at_once),
            ("peak", self.formula_bytes, self.peak_bytes, f"{self.difference:+.1%}"),
        ]

        def mebibytes(size: int | None) -> str:
            return "-" if size is None else f"{size / 2**20:.2f}"

        return [
            (name, mebibytes(formula), mebibytes(compiled), how)
            for name, formula, compiled, how in rows
        ]


def memory_report(
    step: TrainStep, batch: Batch, *, target: str | None = None
) -> MemoryReport:
    """Return every byte of a step, by formula and from the compiled program.

    Args:
        step: From `make_train_step`; on an `absent_mesh` too.
        batch: Arrays or their shapes, as `meshpar.audit` takes them.
        target: Absent hardware to compile for, such as `gpu:h100:1x8`.

    Raises:
        InputError: As for `meshpar.audit`, or the step is of another kind.
    """
    if not isinstance(step, TrainStep):
        raise InputError(
            f"memory_report takes a step of make_train_step, not a "
            f"{type(step).__name__}; for one with tables take "
            "step.predicted_memory(batch), and meshpar.audit(step, batch) for the "
            "compiled program's",
            key="step.wrong_kind",
        )
    report = audit(step, batch, target=target)
    if has_space(step.model_as_given):
        on = step if target is None else step.for_absent(Target.parse(target).platform)
        return _space_report(on, batch, report.compiled_memory)
    run = planned_run(step, batch)
    memory = _planned_memory(step, run)
    return MemoryReport(
        layout=str(step.layout),
        parts=(*states(step), *_temporaries(step, run, memory)),
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
    parts = [part for part in states(step) if part.memory == "device"]
    if has_space(step.model_as_given):
        parts.append(_batch_part(step, batch))
        at_once = traced_space(step, batch).temporary_bytes(_space_degree(step))
        return sum(part.formula_bytes for part in parts), at_once
    memory = _planned_memory(step, planned_run(step, batch))
    return sum(part.formula_bytes for part in parts), memory.temporary_bytes


def _space_report(step: TrainStep, batch: Batch, compiled: MemoryUse) -> MemoryReport:
    """Return the report of a model of volumes, counted in a trace of the whole step."""
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
        parts=(*states(step), _batch_part(step, batch), *temporaries),
        at_once_bytes=round(found.temporary_bytes(degree)),
        temp_bytes=compiled.temp_bytes,
        peak_bytes=compiled.peak_bytes,
    )


def _batch_part(step: TrainStep, batch: Batch) -> Part:
    shapes = batch_structs(batch)
    lie = {
        name: step.placement.batch_sharding(name, one) for name, one in batch.items()
    }
    size = local_bytes(shapes, lie)
    how = "examples over the batch axes, volumes in parts"
    return Part(name="batch", formula_bytes=size, compiled_bytes=size, how=how)


def _space_degree(step: TrainStep) -> int:
    return space_degree(step.model_as_given, step.layout, step.rules)


def _planned_memory(step: TrainStep, run: Run) -> Memory:
    """The planner's count, with the gradients as the step's own specs split them."""
    memory, gradient_bytes = fullest_memory(run), step_gradient_bytes(step)
    late_bytes = gradient_bytes if memory.late_bytes else 0
    return replace(memory, gradient_bytes=gradient_bytes, late_bytes=late_bytes)


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
        ("stash", memory.stash_bytes, f"weight gradients wait: {memory.pending_w:g}"),
        ("gathered weights", memory.gathered_bytes, "whole or cast, for use"),
        ("logits", memory.logit_bytes, "and their gradient, of one microbatch"),
        ("workspace", memory.workspace_bytes, "of one block's backward"),
        ("gradients of the ends", memory.ends_bytes, "whole, once the blocks are done"),
        ("fetched states", memory.fetched_bytes, "from the host, while they change"),
    )
    return [
        Part(name=name, formula_bytes=round(size), compiled_bytes=None, how=how)
        for name, size, how in parts
        if size or name not in ("fetched states", "stash")
    ]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Bytes of one kind of array on one device.

    Args:
        name: Its name.
        formula_bytes: Bytes by arithmetic.
        compiled_bytes: Bytes in the compiled program, if the compiler tells them apart.
        how: The formula in words.
        memory: `device` or `host`.
    """

    name: str
    formula_bytes: int
    compiled_bytes: int | None
    how: str
    memory: str = "device"


def states(step: TrainStep) -> list[Part]:
    """Return the parts of parameters, optimizer state and master copy."""
    opt_state, lies = step.state_shapes.opt_state, step.shardings.opt_state
    inner, inner_lies = inner_state(opt_state), inner_state(lies)
    parts = [_parameters(step)]
    if isinstance(inner, WithOuter):
        replicas = step.layout.data
        parts.append(_optimizer(step, inner.inner, inner_lies.inner, replicas=replicas))
        parts.append(_outer_optimizer(step, inner, inner_lies))
    else:
        parts.append(_optimizer(step, inner, inner_lies))
    if isinstance(opt_state, Mastered):
        parts.append(_master_copy(step, opt_state.master, lies.master))
    return parts


def step_gradient_bytes(step: TrainStep) -> int:
    """Return the bytes of all gradients as a step adds them up."""
    value_bytes = jnp.dtype(step.placement.gradient_dtype).itemsize
    return _by_formula(step, lambda stored: stored.gradient_spec, value_bytes)


def local_bytes(shapes: Any, shardings: Any) -> int:
    """Return the bytes of a tree of arrays on one device."""

    def num_bytes(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> int:
        return math.prod(sharding.shard_shape(shape.shape)) * shape.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(num_bytes, shapes, shardings)))


def _parameters(step: TrainStep) -> Part:
    shapes = step.state_shapes.params
    value_bytes = jax.tree.leaves(shapes)[0].dtype.itemsize
    return Part(
        name="parameters",
        formula_bytes=_by_formula(step, lambda stored: stored.spec, value_bytes),
        compiled_bytes=local_bytes(shapes, step.shardings.params),
        how=f"{value_bytes} bytes a value, split with zero=1, 2, 3",
    )


def _optimizer(
    step: TrainStep, shapes: Any, shardings: Any, *, replicas: int = 1
) -> Part:
    per_value = _values_per_parameter(shapes, sum(_sizes(step)) * replicas)
    return Part(
        name="optimizer",
        formula_bytes=round(_fp32_bytes(step) * per_value),
        compiled_bytes=local_bytes(shapes, shardings),
        how=f"{per_value:.3g} fp32 values for each, split with zero=1, 2, 3",
        memory=step.layout.optimizer_memory,
    )


def _outer_optimizer(step: TrainStep, shapes: WithOuter, shardings: Any) -> Part:
    beside = _values_per_parameter(shapes.outer, sum(_sizes(step)))
    compiled = local_bytes(shapes.start, shardings.start)
    compiled += local_bytes(shapes.outer, shardings.outer)
    return Part(
        name="outer optimizer",
        formula_bytes=round(_fp32_bytes(step) * (1 + beside)),
        compiled_bytes=compiled,
        how=f"the common parameters and {beside:.3g} values for each, fp32",
    )


def _master_copy(step: TrainStep, shapes: Any, shardings: Any) -> Part:
    return Part(
        name="master copy",
        formula_bytes=_fp32_bytes(step),
        compiled_bytes=local_bytes(shapes, shardings),
        how="4 bytes a value, split as the optimizer state",
        memory=step.layout.optimizer_memory,
    )


def _fp32_bytes(step: TrainStep) -> int:
    """Return the bytes of one fp32 value a parameter, split as optimizer state."""
    return _by_formula(step, lambda stored: stored.spec, 4)


def _by_formula(
    step: TrainStep, spec: Callable[[Stored], PartitionSpec], value_bytes: int
) -> int:
    """Return the bytes of one value a parameter, split by one of its specs."""
    placed = jax.tree.leaves(step.placement.stored)
    total = 0
    for size, stored in zip(_sizes(step), placed, strict=True):
        axes = spec_axes(spec(stored))
        total += size * value_bytes // math.prod(step.mesh.shape[a] for a in axes)
    return total


def _sizes(step: TrainStep) -> Iterator[int]:
    """Values of each parameter."""
    for parameter in jax.tree.leaves(step.model.parameters, is_leaf=is_parameter):
        yield math.prod(parameter.stacked_shape)


def _values_per_parameter(inner: Any, num_values: int) -> float:
    """fp32 values of optimizer state for each value of a parameter."""
    sizes = (
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(inner)
    )
    return sum(sizes) / 4 / num_values
