"""Plans of models of volumes: replicas, and devices that share a volume.

Space is cut into slabs, `depth` over `context`, or into beams, `height` over `tensor`
too. Stages are none: they cannot stand beside split space.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from meshpar.errors import InputError
from meshpar.hardware.platforms import platform_named
from meshpar.layout import MESH_AXES, Layout
from meshpar.planner.cost.estimate import gigabytes
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.plan import Plan
from meshpar.planner.search.space import Constraints, divisors
from meshpar.planner.volumes import (
    SPACE,
    VolumeRun,
    VolumeWorkload,
    halo_bytes,
    volume_memory,
    volume_time,
)

_SPLIT = ("data", "context", "tensor")
_KEPT = (*MESH_AXES, "precision", "remat")

PADDING = (
    "note: XLA:TPU lays channels along 128 lanes, and fewer take as much room; so they "
    "are counted (preset unet3d-512, context=8: 72.7 GB compiled for tpu:v5p:2x2x2, "
    "73.4 counted), but not the time that they cost; meshpar audit --target compiles a "
    "layout"
)
"""Note of plans for TPUs; measured with jax 0.10.2 (`docs/guides/volumes.md`)."""


def volume_plan(run: VolumeRun) -> Plan:
    """Return the plan of one layout."""
    memory, halos, work = volume_memory(run), halo_bytes(run), run.workload
    parts = filter(None, run.rules.split(","))
    rules = ", ".join(part.replace("=", '="') + '"' for part in parts)
    more = f", rules=default_rules(layout).with_rules({rules})" if rules else ""
    sums = (
        f"halos of convolutions ({gigabytes(halos)} a device) and sums over space "
        "stand between kernels"
    )
    once = "gradients are reduced once, behind the last backward"
    together = f"{run.sharing} devices together" if run.sharing > 1 else "a device"
    return Plan(
        run=run,
        memory=memory,
        time=volume_time(run),
        model_flops=work.flops * run.global_batch,
        layout_text=f"{run.layout}" + (f" with {run.rules}" if run.rules else ""),
        how_to_run="meshpar.make_train_step(model, optimizer, "
        f"{str(run.layout)!r}{more})",
        memory_parts={
            "volumes": memory.activation_bytes,
            "largest halo": memory.halo_bytes,
            "batch": memory.batch_bytes,
            "states": memory.state_bytes,
            "gradients and used parameters": memory.other_bytes,
        },
        reasons={"data": once, "context": sums, "tensor": sums},
        share=f"{_volumes(run.volumes)} on {together}",
        note=_note(run.cluster),
        details={
            "rules": run.rules,
            "note": _note(run.cluster) or None,
            "halo_bytes": round(halos),
            "memory": {
                **{part: round(size) for part, size in asdict(memory).items()},
                "total_bytes": round(memory.total_bytes),
            },
        },
    )


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

    @property
    def noun(self) -> str:
        """Name of its examples."""
        return "volumes"

    @property
    def note(self) -> str:
        """Caveat of plans for these devices; empty for none."""
        return _note(self.cluster)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.workload.name

    @property
    def heading(self) -> str:
        """The model and the machine, in a line."""
        work = self.workload
        return (
            f"{work.name}: {work.num_parameters / 1e6:.3g} M parameters, "
            f"{work.flops / 1e12:.3g} TFLOP a volume forward and backward, on "
            f"{self.cluster.text}, {_volumes(self.global_batch)} a step"
        )

    def on(self, cluster: Cluster, global_batch: int) -> VolumeRequest:
        """Return the request on other devices."""
        return replace(self, cluster=cluster, global_batch=global_batch)

    @property
    def capacity_bytes(self) -> float:
        """Memory of a device that a plan may fill."""
        return self.constraints.capacity_bytes(self.cluster.device)

    def plans(self) -> list[Plan]:
        """Return all plans that fit, the fastest first.

        Raises:
            InputError: No layout of so many devices divides the batch and the volume.
        """
        capacity = self.capacity_bytes
        fitting = [plan for plan in self._all() if plan.memory.total_bytes <= capacity]
        return sorted(fitting, key=lambda plan: plan.step_s)

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


def _note(cluster: Cluster) -> str:
    return PADDING if platform_named(cluster.device.platform).lanes > 1 else ""


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


def _volumes(count: int) -> str:
    return f"{count:,} volume{'s' if count > 1 else ''}"


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
