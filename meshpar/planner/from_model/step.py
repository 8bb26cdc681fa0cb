"""Runs and workloads of training steps, found by tracing them; nothing is compiled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import jax
import optax
from jax.sharding import Mesh

from meshpar.audit.kernels import kernels_of
from meshpar.audit.needs import exchanges
from meshpar.audit.subject import FlatFunction, Subject
from meshpar.errors import InputError
from meshpar.hardware.devices import DEVICES
from meshpar.layout import Layout
from meshpar.machine.mesh import absent_mesh, mesh_hosts, mesh_platform, slow_mesh_axes
from meshpar.machine.mesh_order import SlowAxis
from meshpar.model.contract import Model
from meshpar.model.inputs import open_size, shapes_of
from meshpar.model.token_order import TokenOrder
from meshpar.parallel.grids.space import has_space
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.step_traffic import sent_in_a_step
from meshpar.planner.from_model.block import traced_workload
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.execution import MESHPAR
from meshpar.planner.volumes import SPACE, Kernel, SpaceWorkload, VolumeWorkload
from meshpar.schedules import tick_table
from meshpar.trace.live_bytes import most_room
from meshpar.trace.operations import Operation, operations
from meshpar.trace.walk import array_shape
from meshpar.train.step import Batch, TrainStep, make_train_step


def planned_run(step: TrainStep, batch: Batch) -> Run:
    """Return the planner's run of a step's own model and layout."""
    layout = step.layout
    global_batch = next(iter(batch.values())).shape[0]
    seq = open_size(step.model.known_inputs, batch)
    held = tick_table(step.schedule).peak_in_flight if step.schedule else None

    def make_run(order: TokenOrder | None) -> Run:
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

    whole = make_run(None)
    if layout.context == 1 and not whole.fused_attention:
        return whole
    # Tiles and a fused kernel alike keep no softmax.
    return make_run(TokenOrder(mesh_axis="context", num_ranks=1))


def _cluster(step: TrainStep) -> Cluster:
    """Cluster of as many devices as the step has; only their platform matters."""
    platform = mesh_platform(step.mesh)
    if platform == "gpu" and jax.default_backend() != "gpu":
        # An absent one has no fused attention (`meshpar.models.layers.attention`).
        platform = "cpu"
    device = replace(DEVICES["h100-80gb"], platform=platform)
    return Cluster(device=device, devices_per_host=step.layout.num_devices)


def slow_links(step: TrainStep, batch: Batch) -> tuple[SlowAxis, ...]:
    """Return the mesh axes on a slower link than necessary, the worst first.

    By the planner's count of the bytes that each sends; `audit` counts what the
    compiled program sends.

    Args:
        step: From `make_train_step`, on devices.
        batch: Arrays or their shapes.
    """
    mesh = step.mesh
    if not isinstance(mesh, Mesh) or len(set(mesh_hosts(mesh))) == 1:
        return ()
    sent: Counter[tuple[str, ...]] = Counter()
    for one in sent_in_a_step(planned_run(step, batch)):
        sent[one.mesh_axes] += round(one.wire_bytes)
    return slow_mesh_axes(mesh, sent)


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
    kernels = kernels_of(traced)
    value_bytes = 2 if precision == "bf16" else 4
    sums = [operation for operation in traced if _sums_space(operation)]
    batch = shapes_of(inputs, {"batch": 1})
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
    once = kernels_of(operations(whole))
    return sum(one.flops for one in kernels) - sum(one.flops for one in once)


def _traced(model: Model, layout: Layout, examples: int) -> Any:
    step = make_train_step(model, optax.adamw(1e-3), layout, mesh=absent_mesh(layout))
    batch: Mapping[str, Any] = shapes_of(model.inputs or {}, {"batch": examples})
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
