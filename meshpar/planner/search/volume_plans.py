"""Plans of models of volumes: replicas, and devices that share a volume.

Space is cut into slabs, `depth` over `context`, or into beams, `height` over `tensor`
too. Stages are none: they cannot stand beside split space.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshpar.errors import InputError
from meshpar.layout import MESH_AXES, Layout
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.plan import Plan
from meshpar.planner.search.result import SearchResult, ranked
from meshpar.planner.search.space import Constraints, divisors
from meshpar.planner.volumes import VolumeRun, cluster_notes, volume_plan
from meshpar.planner.workload.volumes import SPACE, VolumeWorkload

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

    def search(self, *, num_plans: int = _NUM_PLANS) -> SearchResult:
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
    """Return a step's error for parts that `convolution_gradients` cannot take."""
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
