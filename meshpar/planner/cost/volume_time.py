"""Memory and time of a step on volumes whose space devices share.

Assumed: kernels achieve what matmuls of as many FLOPs and bytes do; elementwise work is
fused into passes over what sums read and what waits for the backward; nothing hides
halos, sums or the reduction of gradients; what XLA:TPU pads costs room and no time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshpar.hardware import device as matmul_time
from meshpar.layout import BATCH_AXES, Layout
from meshpar.planner.cost.step_time import StepTime, straggler_fraction
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.collective_cost import all_reduce_s, send_s
from meshpar.planner.machine.link import Link
from meshpar.planner.workload.volume import SPACE, Degrees, VolumeWorkload

_STATE_BYTES, _UPDATE_BYTES, _GRADIENT_BYTES = 12, 28, 4
"""Of a parameter in fp32 with Adam: it and two moments; these read and written, the
gradient read; a gradient."""

_SPACE_AXES = ("context", "tensor")


@dataclass(frozen=True, kw_only=True)
class VolumeRun:
    """A workload of volumes on a cluster under a layout.

    Args:
        workload, cluster, layout: Model, machine and layout.
        mesh_axes: Mesh axis that splits each dim of space; "" for none.
        global_batch: Volumes in a step.
    """

    workload: VolumeWorkload
    cluster: Cluster
    layout: Layout
    mesh_axes: tuple[str, str, str]
    global_batch: int

    @property
    def degrees(self) -> Degrees:
        """Number of devices that share each dim of space."""
        sizes = self.layout.mesh_shape
        first, second, third = (sizes.get(axis, 1) for axis in self.mesh_axes)
        return first, second, third

    @property
    def sharing(self) -> int:
        """Number of devices that share one volume."""
        return math.prod(self.degrees)

    @property
    def volumes(self) -> int:
        """Number of volumes of a step on one device, or on devices that share them."""
        return self.global_batch // self.layout.batch_shards

    @property
    def rules(self) -> str:
        """Rules that differ from the layout's defaults, as text; empty for none."""
        if 1 in (self.layout.context, self.layout.tensor):
            return ""
        named = zip(SPACE, self.mesh_axes, strict=True)
        return ",".join(f"{dim}={axis}" for dim, axis in named if axis)

    def link(self, *mesh_axes: str) -> Link:
        """Return the link that collectives over these mesh axes run on."""
        return self.cluster.link(self.layout, *mesh_axes)


@dataclass(frozen=True, kw_only=True)
class VolumeMemory:
    """Bytes of one device.

    Args:
        state_bytes: Parameters and optimizer state.
        batch_bytes: Its parts of the batch.
        activation_bytes: Arrays of volumes, at the fullest moment.
        halo_bytes: Largest halo of a convolution.
        other_bytes: Gradients, and parameters as they are used.
    """

    state_bytes: float
    batch_bytes: float
    activation_bytes: float
    halo_bytes: float
    other_bytes: float

    @property
    def total_bytes(self) -> float:
        """Bytes of the device in all."""
        kept = self.state_bytes + self.batch_bytes
        return kept + self.activation_bytes + self.halo_bytes + self.other_bytes


def volume_memory(run: VolumeRun) -> VolumeMemory:
    """Return the memory of a step on one device."""
    work, share = run.workload, run.volumes / run.sharing
    on_tpus = run.cluster.device.platform == "tpu"
    at_once = work.on_tpus if on_tpus else work.at_once
    return VolumeMemory(
        state_bytes=_STATE_BYTES * work.num_parameters,
        batch_bytes=work.batch_bytes * share,
        activation_bytes=run.volumes * at_once.activation_bytes(run.sharing),
        halo_bytes=run.volumes * work.largest_halo_bytes(run.degrees),
        other_bytes=at_once.other_bytes,
    )


def halo_bytes(run: VolumeRun) -> float:
    """Return the bytes that one device sends to its neighbours in a step."""
    return run.volumes * sum(
        sum(one.halo_bytes(run.degrees)) for one in run.workload.kernels
    )


def volume_time(run: VolumeRun) -> StepTime:
    """Return the time of a step, by what it is spent on."""
    work, device = run.workload, run.cluster.device
    share = run.volumes / run.sharing
    compute_s = matmul_time.memory_s(device, work.passed_bytes * share)
    for one in work.kernels:
        compute_s += matmul_time.matmul_s(
            device, work.precision, one.flops * share, one.num_bytes * share
        )
    exposed_s = exposed(run)
    optimizer_s = matmul_time.memory_s(device, _UPDATE_BYTES * work.num_parameters)
    busy_s = compute_s + sum(exposed_s.values()) + optimizer_s
    return StepTime(
        compute_s=compute_s,
        bubble_s=0.0,
        exposed_s=exposed_s,
        optimizer_s=optimizer_s,
        straggler_s=busy_s * straggler_fraction(run.cluster),
        host_s=0.0,
    )


def exposed(run: VolumeRun) -> dict[str, float]:
    """Return the seconds that a step waits for each mesh axis.

    Halos go over the axis of their dim, one port and one hop for each convolution;
    sums over all devices that share a volume, as do kernels' gradients, which replicas
    then add up.
    """
    found: dict[str, float] = {}
    for dim, axis in enumerate(run.mesh_axes):
        if not axis or run.degrees[dim] == 1:
            continue
        sent = [one.halo_bytes(run.degrees)[dim] for one in run.workload.kernels]
        halos = (send_s(run.volumes * one, run.link(axis)) for one in sent if one)
        found[axis] = found.get(axis, 0.0) + sum(halos)
    gradients = _GRADIENT_BYTES * run.workload.num_parameters
    if run.sharing > 1:
        axes = [axis for axis in _SPACE_AXES if run.layout.mesh_shape[axis] > 1]
        link = run.link(*axes)
        sums_s = run.workload.num_sums * all_reduce_s(0.0, run.sharing, link)
        found[axes[0]] += sums_s + all_reduce_s(gradients, run.sharing, link)
    if run.layout.batch_shards > 1:
        replicas = run.layout.batch_shards
        axes = [axis for axis in BATCH_AXES if run.layout.mesh_shape[axis] > 1]
        found[axes[0]] = all_reduce_s(gradients, replicas, run.link(*axes))
    return found
