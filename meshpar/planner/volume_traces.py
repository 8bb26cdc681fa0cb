"""Workloads of models of volumes, their kernels and arrays, found by tracing steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import jax
import optax

from meshpar.audit.needs import CONVOLUTION, MATMUL, exchanges, window_reach
from meshpar.audit.subject import FlatFunction, Subject
from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.machine.mesh import absent_mesh
from meshpar.model.contract import Model
from meshpar.model.inputs import input_shapes
from meshpar.parallel.grids.space import has_space
from meshpar.planner.workload.volumes import (
    SPACE,
    Kernel,
    SpaceWorkload,
    VolumeWorkload,
)
from meshpar.trace.costs import equation_flops, most_room
from meshpar.trace.operations import Operation, operations
from meshpar.trace.walk import array_dtype, array_shape
from meshpar.train.make_step import make_train_step


def traced_kernels(operations: Iterable[Operation]) -> tuple[Kernel, ...]:
    """Every convolution and matmul: its FLOPs, its bytes, and what halos it reads.

    One in a scan is there once for each time that it runs.

    Args:
        operations: Of a traced step (`traced.operations`).
    """
    return tuple(
        kernel
        for operation in operations
        if operation.name in (CONVOLUTION, MATMUL)
        for kernel in (_kernel(operation),) * operation.times
    )


def _kernel(operation: Operation) -> Kernel:
    equation = operation.equation
    left = array_shape(equation.invars[0])
    num_bytes = sum(
        math.prod(array_shape(one)) * array_dtype(one).itemsize
        for one in (*equation.invars[:2], equation.outvars[0])
    )
    flops = equation_flops(equation)
    if operation.name == MATMUL:
        return Kernel(flops=flops, num_bytes=num_bytes)
    numbers = equation.params["dimension_numbers"]
    space = [left[dim] for dim in numbers.lhs_spec[2:]]
    if len(space) != len(SPACE):  # of no volume, so that no halo is sent
        return Kernel(flops=flops, num_bytes=num_bytes)
    reach = window_reach(equation)
    return Kernel(
        flops=flops,
        num_bytes=num_bytes,
        sizes=(space[0], space[1], space[2]),
        reach=(reach[0], reach[1], reach[2]),
        window=_window(equation),
        place_bytes=math.prod(left)
        // math.prod(space)
        * array_dtype(equation.invars[0]).itemsize,
    )


def _window(equation: Any) -> tuple[int, int, int]:
    """Places that a step's check of parts counts: of what reads between places, one.

    Of a kernel's gradient, the result is as large as the window.
    """
    numbers, params = equation.params["dimension_numbers"], equation.params
    if max(params["lhs_dilation"]) > 1:
        return 1, 1, 1
    right, result = array_shape(equation.invars[1]), array_shape(equation.outvars[0])
    first, second, third = (
        min(right[one], result[other])
        for one, other in zip(numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    )
    return first, second, third


def traced_volume(
    model: Model, name: str, *, precision: str = "bf16", remat: str = "none"
) -> VolumeWorkload:
    """Return the workload of a model whose inputs declare `depth`.

    Args:
        model: The model, which declares the sizes of its volumes.
        name: Name in reports.
        precision: Precision of its blocks.
        remat: `Layout.remat`.

    Raises:
        InputError: The model reads no volumes, or leaves their size open.
    """
    inputs = model.inputs or {}
    if not has_space(model) or any(
        None in one.sizes[1:] for one in inputs.values() if "depth" in one.logical_axes
    ):
        raise InputError(
            f"{name} has no inputs with 'depth' whose sizes it declares; plan it as a "
            "volume only where Input(..., shape=) says how large that is",
            key="plan.undeclared_volume_size",
        )
    layout = Layout(precision=precision, remat=remat)
    once, twice = (_traced(model, layout, examples) for examples in (1, 2))
    at_once, on_tpus = (
        SpaceWorkload.from_peaks(most_room(once, platform), most_room(twice, platform))
        for platform in ("gpu", "tpu")
    )
    traced = operations(once)
    kernels = traced_kernels(traced)
    value_bytes = 2 if precision == "bf16" else 4
    sums = [operation for operation in traced if _sums_space(operation)]
    batch = input_shapes(inputs, {"batch": 1})
    return VolumeWorkload(
        name=name,
        precision=precision,
        num_parameters=model.num_parameters,
        kernels=kernels,
        summed_bytes=sum(
            one.times * math.prod(array_shape(one.equation.invars[0])) * value_bytes
            for one in sums
        ),
        num_sums=sum(one.times for one in sums if 0 not in one.equation.params["axes"]),
        at_once=at_once,
        on_tpus=on_tpus,
        batch_bytes=sum(
            math.prod(one.shape) * one.dtype.itemsize for one in batch.values()
        ),
        least_sizes=_least_sizes(model, kernels),
        recomputed_flops=_recomputed_flops(model, layout, kernels),
    )


def _sums_space(operation: Operation) -> bool:
    """Return True if it sums over places, not only over classes or channels."""
    if operation.name != "reduce_sum":
        return False
    num_dims = len(array_shape(operation.equation.invars[0]))
    places = range(1, 1 + len(SPACE))
    return num_dims > len(SPACE) and any(
        dim in operation.equation.params["axes"] for dim in places
    )


def _recomputed_flops(
    model: Model, layout: Layout, kernels: tuple[Kernel, ...]
) -> float:
    if layout.remat == "none":
        return 0.0
    whole = _traced(model, replace(layout, remat="none"), 1)
    once = traced_kernels(operations(whole))
    return sum(one.flops for one in kernels) - sum(one.flops for one in once)


def _traced(model: Model, layout: Layout, examples: int) -> Any:
    step = make_train_step(model, optax.adamw(1e-3), layout, mesh=absent_mesh(layout))
    batch: Mapping[str, Any] = input_shapes(model.inputs or {}, {"batch": examples})
    return step.audit_subject(batch).flat().jaxpr


def _least_sizes(model: Model, kernels: tuple[Kernel, ...]) -> tuple[int, int, int]:
    """Greatest common divisors of the sizes of inputs and of convolutions' operands."""
    sizes = [
        dict(zip(one.logical_axes, one.sizes, strict=True))
        for one in (model.inputs or {}).values()
        if "depth" in one.logical_axes
    ]
    read = [tuple(one.get(dim) or 1 for dim in SPACE) for one in sizes]
    read += [one.sizes for one in kernels if one.place_bytes]
    first, second, third = (math.gcd(*along) for along in zip(*read, strict=True))
    return first, second, third


class _Traced(Protocol):
    def audit_subject(self, *arguments: Any) -> Subject: ...


def traced_space(step: _Traced, batch: Mapping[str, Any]) -> SpaceWorkload:
    """Return the arrays and halos of a step on volumes.

    It is traced on its batch and on one twice as large: arrays that grow are of
    volumes. A step for TPUs has its arrays as XLA lays them out there.

    Args:
        step: From `make_train_step`; on an `absent_mesh` too.
        batch: Arrays or their shapes, the example first.
    """
    subject, once = _flat(step, batch, 1)
    _, twice = _flat(step, batch, 2)
    traced = operations(once.jaxpr, once.in_shardings, once.weights)
    least, most = (most_room(one.jaxpr, subject.platform) for one in (once, twice))
    return SpaceWorkload.from_peaks(least, most, exchanges(traced, subject.mesh_shape))


def _flat(
    step: _Traced, batch: Mapping[str, Any], times: int
) -> tuple[Subject, FlatFunction]:
    shapes = {
        name: jax.ShapeDtypeStruct(
            (times * array.shape[0], *array.shape[1:]), array.dtype
        )
        for name, array in batch.items()
    }
    subject = step.audit_subject(shapes)
    return subject, subject.flat()
