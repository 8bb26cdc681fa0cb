"""Plans of models of volumes, whose space devices may share: memory and time of a step.

Assumed: kernels achieve what matmuls of as many FLOPs and bytes do; elementwise work is
fused into passes over what sums read and what waits for the backward; nothing hides
halos, sums or the reduction of gradients; what XLA:TPU pads costs room and no time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshpar.errors import InputError
from meshpar.hardware import device as matmul_time
from meshpar.hardware.platforms import platform_named
from meshpar.layout import BATCH_AXES, MESH_AXES, Layout
from meshpar.planner.cost.step_time import StepTime, straggler_fraction
from meshpar.planner.machine.cluster import Cluster, Link
from meshpar.planner.machine.collective_cost import all_reduce_s, send_s
from meshpar.planner.plan import Plan, gigabytes
from meshpar.planner.search.result import SearchResult, ranked
from meshpar.planner.search.space import Constraints, divisors
from meshpar.planner.workload.volumes import SPACE, Degrees, VolumeWorkload

_STATE_BYTES, _UPDATE_BYTES, _GRADIENT_BYTES = 12, 28, 4
"""Bytes of an fp32 parameter with Adam: value and two moments; these read and written
and the gradient read; its gradient."""

_SPACE_AXES = ("context", "tensor")

PADDING = (
    "note: XLA:TPU lays channels along 128 lanes, and fewer take as much room; so they "
    "are counted (preset unet3d-512, context=8: 72.7 GB compiled for tpu:v5p:2x2x2, "
    "73.4 counted), but not the time that they cost; meshpar audit --target compiles a "
    "layout"
)
"""Note of plans for TPUs; measured with jax 0.10.2 (`docs/guides/volumes.md`)."""


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

    @property
    def heading(self) -> str:
        """The model and the machine, in a line."""
        work = self.workload
        return (
            f"{work.name}: {work.num_parameters / 1e6:.3g} M parameters, "
            f"{work.flops / 1e12:.3g} TFLOP a volume forward and backward, on "
            f"{self.cluster.text}, {count_volumes(self.global_batch)} a step"
        )

    @property
    def layout_text(self) -> str:
        """The layout, and the rules that it takes."""
        return f"{self.layout}" + (f" with {self.rules}" if self.rules else "")

    @property
    def share(self) -> str:
        """Part of the batch on a device, in words."""
        shared = self.sharing > 1
        together = f"{self.sharing} devices together" if shared else "a device"
        return f"{count_volumes(self.volumes)} on {together}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats of plans for these devices."""
        return cluster_notes(self.cluster)

    @property
    def examples(self) -> tuple[int, str]:
        """Number of volumes of a step."""
        return self.global_batch, "volumes"

    @property
    def kind(self) -> str:
        """Kind of the model."""
        return "models of volumes"

    @property
    def model_flops(self) -> float:
        """FLOPs of one step, without recomputation."""
        return self.workload.flops * self.global_batch

    @property
    def python_call(self) -> str:
        """Call that makes the training step, with the rules that it takes."""
        parts = filter(None, self.rules.split(","))
        rules = ", ".join(part.replace("=", '="') + '"' for part in parts)
        more = f", rules=default_rules(layout).with_rules({rules})" if rules else ""
        line = str(self.layout)
        return f"meshpar.make_train_step(model, optimizer, {line!r}{more})"

    def why_exposed(self, mesh_axis: str) -> str:
        """Return the reason why the step waits for a mesh axis."""
        if mesh_axis == "data":
            return "gradients are reduced once, behind the last backward"
        return (
            f"halos of convolutions ({gigabytes(halo_bytes(self))} a device) and sums "
            "over space stand between kernels"
        )

    def as_json(self) -> dict[str, Any]:
        """Return entries of a plan's JSON that only volumes have."""
        return {
            "rules": self.rules,
            "note": next(iter(self.notes), None),
            "halo_bytes": round(halo_bytes(self)),
        }


def count_volumes(count: int) -> str:
    """Return a number of volumes in words."""
    return f"{count:,} volume{'s' if count > 1 else ''}"


def cluster_notes(cluster: Cluster) -> tuple[str, ...]:
    """Return the caveats of plans for these devices."""
    has_lanes = platform_named(cluster.device.platform).lanes > 1
    return (PADDING,) if has_lanes else ()


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

    def lines(self, _: Layout) -> list[str]:
        """Return a line of text: bytes by what they are for."""
        return [
            f"volumes {gigabytes(self.activation_bytes)}, largest halo "
            f"{gigabytes(self.halo_bytes)}, batch {gigabytes(self.batch_bytes)}, "
            f"states {gigabytes(self.state_bytes)}, gradients and used parameters "
            f"{gigabytes(self.other_bytes)}"
        ]

    def as_json(self) -> dict[str, float]:
        """Return the parts and their sum, in whole bytes."""
        parts = {part: round(size) for part, size in asdict(self).items()}
        return {**parts, "total_bytes": round(self.total_bytes)}


def volume_plan(run: VolumeRun) -> Plan[VolumeRun, VolumeMemory]:
    """Return the plan of one layout."""
    return Plan(run=run, memory=volume_memory(run), timer=volume_time)


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


_SPLIT = ("data", "context", "tensor")
_KEPT = (*MESH_AXES, "precision", "remat")
_NUM_PLANS = 10


@dataclass(frozen=True, kw_only=True)
class VolumeRequest:
    """A model of volumes, a machine and a batch to find a layout for.

    Args:
        workload: The model.
        cluster: The devices.
        global_batch: Volumes in a step.
        constraints: Limits of the search.

    Raises:
        InputError: A constraint that a plan of volumes does not know.
    """

    workload: VolumeWorkload
    cluster: Cluster
    global_batch: int
    constraints: Constraints = Constraints()

    def __post_init__(self) -> None:
        check_kept(self.constraints)

    noun = "volumes"

    @property
    def note(self) -> str:
        """Caveat of plans for these devices; empty for none."""
        return " ".join(cluster_notes(self.cluster))

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.workload.name

    def on(self, cluster: Cluster, global_batch: int) -> VolumeRequest:
        """Return the request on other devices."""
        return replace(self, cluster=cluster, global_batch=global_batch)

    @property
    def capacity_bytes(self) -> float:
        """Memory of a device that a plan may fill."""
        return self.constraints.capacity_bytes(self.cluster.device)

    def search(
        self, *, num_plans: int = _NUM_PLANS, plans_only: bool = False
    ) -> SearchResult:
        """Estimate all layouts, and return the fastest that fit.

        Raises:
            InputError: No layout of so many devices divides the batch and the volume.
        """
        started = time.perf_counter()
        return ranked(self._all(), self.capacity_bytes, num_plans, started)

    def kept_plan(self) -> tuple[Plan, bool]:
        """Return the plan of the kept layout, and True if it fits.

        Raises:
            InputError: It does not divide the batch and the volume.
        """
        plan = self._all()[0]
        return plan, plan.memory.total_bytes <= self.capacity_bytes

    def _all(self) -> list[Plan]:
        dividing = list(volume_runs(self))
        refused = [_refusal(run) for run in dividing]
        runs = [run for run, why in zip(dividing, refused, strict=True) if why is None]
        for why in refused if not runs else ():
            if why is not None:
                raise why
        if not runs:
            sizes = zip(SPACE, self.workload.least_sizes, strict=True)
            raise InputError(
                f"no layout of {self.cluster.num_devices} devices divides "
                f"global_batch={self.global_batch} and the coarsest level ("
                + ", ".join(f"{dim}={size}" for dim, size in sizes)
                + "); give another number of devices or keep less",
                key="plan.no_dividing_layout",
            )
        return [volume_plan(run) for run in runs]


def _refusal(run: VolumeRun) -> InputError | None:
    """Return a step's error for parts that `own_convolution` cannot take."""
    found = run.workload.short_part(run.degrees)
    if run.layout.batch_shards == 1 or found is None:
        return None
    kernel, dim = found
    return InputError(
        f"layout {str(run.layout)!r}: {SPACE[dim]!r} has {kernel.sizes[dim]} places at "
        f"a convolution with a window of {kernel.window[dim]}, and a device "
        f"{kernel.sizes[dim] // run.degrees[dim]} of them: beside split examples and "
        f"longer parts of another dim the step is refused; split {SPACE[dim]!r} over "
        "fewer devices, or leave the examples whole",
        key="grid.short_part_beside_examples",
    )


def check_kept(constraints: Constraints) -> None:
    """Check that plans of volumes have every kept key.

    Raises:
        InputError: A key is kept that they lack, or a mesh axis that they do not split.
    """
    for key, value in constraints.kept.items():
        if key not in _KEPT:
            raise InputError(
                f"{key}={value} is kept, but plans of volumes have "
                f"{', '.join(_KEPT)} alone; leave it out",
                key="plan.unknown_kept_key",
            )
        if key in MESH_AXES and key not in _SPLIT and value > 1:
            raise InputError(
                f"{key}={value} is kept, but plans of volumes split "
                f"{', '.join(_SPLIT)} alone; leave it out, data= gives replicas",
                key="plan.unsplit_axis_kept",
            )


def volume_runs(request: VolumeRequest) -> Iterator[VolumeRun]:
    """Yield every layout that divides the batch and all levels of a volume."""
    devices, work = request.cluster.num_devices, request.workload
    constraints, kept = request.constraints, request.constraints.kept
    for data in divisors(devices):
        for context in divisors(devices // data):
            tensor = devices // data // context
            sizes = {"data": data, "context": context, "tensor": tensor}
            deep, high, _ = work.least_sizes
            divides = request.global_batch % data == 0 and deep % context == 0
            # Alone, `tensor` cuts slabs as `context` does.
            alone = context == 1 and tensor > 1
            divides &= (deep if alone else high) % tensor == 0
            is_kept = kept.get("tensor") == tensor
            allowed = all(
                size == kept.get(axis, size)
                and (size == 1 or axis not in constraints.forbidden)
                for axis, size in sizes.items()
            )
            if not divides or not allowed or (alone and not is_kept):
                continue
            remat = kept.get("remat", "none")
            layout = Layout(
                data=data,
                context=context,
                tensor=tensor,
                precision=work.precision,
                remat=remat,
            )
            active = [axis for axis in ("context", "tensor") if sizes[axis] > 1]
            axes = [*active, "", ""][:2]
            yield VolumeRun(
                workload=work,
                cluster=request.cluster,
                layout=layout,
                mesh_axes=(axes[0], axes[1], ""),
                global_batch=request.global_batch,
            )
