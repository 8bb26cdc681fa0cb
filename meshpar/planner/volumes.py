"""Models of volumes: their workload, and memory and time of a step that shares space.

Numbers of a workload are of one example whose space one device has; sizes and windows
say how they divide over devices.

Assumed: kernels achieve what matmuls of as many FLOPs and bytes do; elementwise work is
fused into passes over what sums read and what waits for the backward; nothing hides
halos, sums or the reduction of gradients; what XLA:TPU pads costs room and no time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshpar.hardware import device as matmul_time
from meshpar.hardware.platforms import platform_named
from meshpar.layout import BATCH_AXES, Layout
from meshpar.planner.cost.step_time import StepTime, straggler_fraction
from meshpar.planner.machine.cluster import Cluster, Link
from meshpar.planner.machine.collective_cost import all_reduce_s, send_s
from meshpar.rules.spatial import short_dim


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Halos of one convolution, on one device.

    Args:
        sent_bytes: Bytes sent to its neighbours, along all split dims together.
    """

    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class SpaceWorkload:
    """Arrays of a step on volumes at its fullest moment, one device for all of space.

    Args:
        volume_bytes: Bytes of arrays that grow with the examples of a device.
        other_bytes: Bytes of all others: gradients, and parameters as they are used.
        exchanges: Halos of each convolution, forward and backward.
    """

    volume_bytes: int
    other_bytes: int
    exchanges: tuple[Exchange, ...] = ()

    @classmethod
    def from_peaks(
        cls, once: int, twice: int, exchanges: tuple[Exchange, ...] = ()
    ) -> SpaceWorkload:
        """Return it from the peak bytes of a batch, and of one twice as large.

        Example:
            >>> SpaceWorkload.from_peaks(12, 20)
            SpaceWorkload(volume_bytes=8, other_bytes=4, exchanges=())
        """
        return cls(
            volume_bytes=twice - once,
            other_bytes=max(0, 2 * once - twice),
            exchanges=exchanges,
        )

    @property
    def halo_bytes(self) -> int:
        """Bytes that one device sends to its neighbours in a step."""
        return sum(one.sent_bytes for one in self.exchanges)

    def activation_bytes(self, degree: int) -> float:
        """Return the bytes of arrays of volumes whose space `degree` devices share.

        Example:
            >>> SpaceWorkload(volume_bytes=800, other_bytes=10).activation_bytes(8)
            100.0
        """
        return self.volume_bytes / degree

    @property
    def received_bytes(self) -> int:
        """Bytes of the largest halo of a convolution."""
        return max((one.sent_bytes for one in self.exchanges), default=0)

    def temporary_bytes(self, degree: int) -> float:
        """Return the most bytes at once besides what is kept between steps."""
        return self.activation_bytes(degree) + self.received_bytes + self.other_bytes


SPACE = ("depth", "height", "width")
Degrees = tuple[int, int, int]
"""Devices that share each dim of space."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A convolution or a matmul of a step, forward or backward.

    Args:
        flops: Two for each multiply and add.
        num_bytes: Bytes of its operands and its result.
        sizes: Places that it reads, along each dim of space.
        reach: Places beyond the edges of a part that it reads, both sides together; 0
            for a matmul.
        window: Places of its window, along each dim; 1 for a matmul.
        place_bytes: Bytes of one place; 0 if it is no convolution of volumes.
    """

    flops: float
    num_bytes: float
    sizes: tuple[int, int, int] = (1, 1, 1)
    reach: tuple[int, int, int] = (0, 0, 0)
    window: tuple[int, int, int] = (1, 1, 1)
    place_bytes: int = 0

    def halo_bytes(self, degrees: Degrees) -> tuple[float, float, float]:
        """Return the bytes one device sends along each dim, to both sides together.

        Dims are exchanged one after another, a later one with the halos of earlier:

            sent(dim) = reach(dim) * places of the other dims * bytes of a place

        Example:
            >>> kernel = Kernel(
            ...     flops=0,
            ...     num_bytes=0,
            ...     sizes=(8, 4, 4),
            ...     reach=(2, 2, 2),
            ...     place_bytes=2,
            ... )
            >>> kernel.halo_bytes((4, 2, 1))
            (32.0, 64.0, 0.0)
        """
        local = [
            size / degree for size, degree in zip(self.sizes, degrees, strict=True)
        ]
        sent = [0.0, 0.0, 0.0]
        for dim, places in enumerate(self.reach):
            if degrees[dim] > 1 and places:
                sent[dim] = places * math.prod(local) / local[dim] * self.place_bytes
                local[dim] += places
        return sent[0], sent[1], sent[2]


@dataclass(frozen=True, kw_only=True)
class VolumeWorkload:
    """A step on one volume, one device for all of space, as a trace has it.

    Args:
        name: Name in reports.
        precision: Precision of its blocks.
        num_parameters: Number of parameters.
        kernels: Convolutions and matmuls, forward and backward.
        summed_bytes: Bytes that sums over space read: norms and the loss.
        num_sums: Number of sums of each example, which the next operation waits for;
            sums over examples too are gradients of norms and biases.
        at_once: Arrays at its fullest moment, without halos.
        on_tpus: The same, as XLA:TPU lays arrays out.
        batch_bytes: Bytes of an example's arrays.
        least_sizes: Size along each dim of space that devices must divide: the
            greatest common divisor of all levels'.
        recomputed_flops: FLOPs of the kernels that the backward recomputes.
    """

    name: str
    precision: str
    num_parameters: int
    kernels: tuple[Kernel, ...]
    summed_bytes: float
    num_sums: int
    at_once: SpaceWorkload
    on_tpus: SpaceWorkload
    batch_bytes: int
    least_sizes: tuple[int, int, int]
    recomputed_flops: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of one example, forward and backward, without recomputation."""
        return sum(kernel.flops for kernel in self.kernels) - self.recomputed_flops

    @property
    def passed_bytes(self) -> float:
        """Bytes read and written besides the kernels.

        Sums read their operand; arrays of the fullest moment are written and read once.
        """
        return self.summed_bytes + 2 * self.at_once.volume_bytes

    def short_part(self, degrees: Degrees) -> tuple[Kernel, int] | None:
        """Return a convolution and a dim along which a step refuses split examples."""
        split = [dim for dim, degree in enumerate(degrees) if degree > 1]
        for kernel in self.kernels:
            parts = [
                size // degree
                for size, degree in zip(kernel.sizes, degrees, strict=True)
            ]
            dim = short_dim(parts, kernel.window, split)
            if kernel.place_bytes and dim is not None:
                return kernel, dim
        return None

    def largest_halo_bytes(self, degrees: Degrees) -> float:
        """Return the bytes of the largest halo of a convolution."""
        return max((sum(one.halo_bytes(degrees)) for one in self.kernels), default=0.0)


_STATE_BYTES, _UPDATE_BYTES, _GRADIENT_BYTES = 12, 28, 4
"""Bytes of an fp32 parameter with Adam: value and two moments; these read and written
and the gradient read; its gradient."""

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
    has_lanes = platform_named(run.cluster.device.platform).lanes > 1
    at_once = work.on_tpus if has_lanes else work.at_once
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
    waits_s: dict[str, float] = {}
    for dim, axis in enumerate(run.mesh_axes):
        if not axis or run.degrees[dim] == 1:
            continue
        sent = [one.halo_bytes(run.degrees)[dim] for one in run.workload.kernels]
        halos = (send_s(run.volumes * one, run.link(axis)) for one in sent if one)
        waits_s[axis] = waits_s.get(axis, 0.0) + sum(halos)
    gradients = _GRADIENT_BYTES * run.workload.num_parameters
    if run.sharing > 1:
        axes = [axis for axis in _SPACE_AXES if run.layout.mesh_shape[axis] > 1]
        link = run.link(*axes)
        sums_s = run.workload.num_sums * all_reduce_s(0.0, run.sharing, link)
        waits_s[axes[0]] += sums_s + all_reduce_s(gradients, run.sharing, link)
    if run.layout.batch_shards > 1:
        replicas = run.layout.batch_shards
        axes = [axis for axis in BATCH_AXES if run.layout.mesh_shape[axis] > 1]
        waits_s[axes[0]] = all_reduce_s(gradients, replicas, run.link(*axes))
    return waits_s
