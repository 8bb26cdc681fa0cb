"""Plans of models that are no transformers: what curves and commands read of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from meshpar.layout import Layout
from meshpar.planner.cost.estimate import milliseconds
from meshpar.planner.cost.step_time import StepTime
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.link import Link


class _Run(Protocol):
    @property
    def cluster(self) -> Cluster: ...

    @property
    def layout(self) -> Layout: ...

    def link(self, *mesh_axes: str) -> Link: ...


class _Memory(Protocol):
    @property
    def total_bytes(self) -> float: ...


class OtherPlan(Protocol):
    """A plan of a model that is no transformer: what curves and commands read of it."""

    @property
    def run(self) -> _Run:
        """With the layout and its links."""

    @property
    def memory(self) -> _Memory:
        """Of one device."""

    @property
    def time(self) -> StepTime:
        """Where the step's time goes."""

    @property
    def step_s(self) -> float:
        """Time of one step."""

    @property
    def model_flops(self) -> float:
        """FLOPs of the matmuls and convolutions of one step, nothing recomputed."""

    @property
    def mfu(self) -> float:
        """Of the devices' peak (`mfu_of`)."""

    @property
    def lines(self) -> list[str]:
        """What people read of it: memory, time, and what waits."""

    @property
    def layout_in_words(self) -> str:
        """The layout, and what else a step is given."""

    @property
    def how_to_run(self) -> str:
        """The call that trains under it."""

    def why_exposed(self, mesh_axis: str) -> str:
        """What waits for a mesh axis."""

    def as_json(self) -> dict[str, Any]:
        """One of the `plans` of `meshpar plan --json`."""


def mfu_of(plan: OtherPlan) -> float:
    """FLOPs of the model's matmuls over what all devices could do then."""
    cluster = plan.run.cluster
    peak_flops = cluster.device.peak_flops[plan.run.layout.precision]
    return plan.model_flops / (peak_flops * cluster.num_devices * plan.step_s)


def fits(plan: OtherPlan) -> bool:
    """Whether the fullest device has room."""
    return plan.memory.total_bytes <= plan.run.cluster.device.usable_bytes


def exposed_lines(plan: OtherPlan) -> list[str]:
    """What people read of the mesh axes that are waited for."""
    return [
        f"  exposed on {axis} ({plan.run.link(axis).name}) {milliseconds(seconds)}: "
        f"{plan.why_exposed(axis)}"
        for axis, seconds in plan.time.exposed_s.items()
    ]


def shared_json(plan: OtherPlan) -> dict[str, Any]:
    """Of `as_json`, what plans of every kind of model have."""
    return {
        "layout": str(plan.run.layout),
        "step_s": plan.step_s,
        "mfu": plan.mfu,
        "fits": fits(plan),
        "time": plan.time.as_json(),
    }


@runtime_checkable
class OtherRequest(Protocol):
    """A model that is no transformer, on devices: what a curve asks of it."""

    @property
    def cluster(self) -> Cluster:
        """The most devices."""

    @property
    def global_batch(self) -> int:
        """Examples in a step."""

    @property
    def capacity_bytes(self) -> float:
        """What a plan may fill of a device."""

    @property
    def what(self) -> str:
        """What is planned, in a line."""

    @property
    def name(self) -> str:
        """Of the model."""

    @property
    def noun(self) -> str:
        """What its examples are called."""

    @property
    def note(self) -> str:
        """What the reader must know of all plans; empty for nothing."""

    def on(self, cluster: Cluster, global_batch: int) -> OtherRequest:
        """The same on other devices."""

    def plans(self) -> Sequence[OtherPlan]:
        """All that fit, the fastest first."""

    def of_layout(self) -> tuple[OtherPlan, bool]:
        """The one that all that is kept describes, and whether it fits."""
