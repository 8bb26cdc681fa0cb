"""Plan of a model that is no transformer: memory, time, and their text and JSON.

Volumes and tables give the parts; `meshpar.planner.cost.estimate` has transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from meshpar.layout import Layout
from meshpar.planner.cost.estimate import gigabytes, milliseconds
from meshpar.planner.cost.step_time import StepTime
from meshpar.planner.machine.cluster import Cluster, Link


class PlannedRun(Protocol):
    """A model on a cluster under a layout."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def layout(self) -> Layout: ...

    def link(self, *mesh_axes: str) -> Link: ...


class PlannedMemory(Protocol):
    """Bytes of one device."""

    @property
    def total_bytes(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Estimated memory and time of a step under one layout.

    Args:
        run: Machine and layout.
        memory: Bytes of the fullest device.
        time: Seconds of the step, by what they are spent on.
        model_flops: FLOPs of the step's matmuls and convolutions, without
            recomputation.
        layout_text: The layout, and further arguments of the step.
        how_to_run: The call that trains under it.
        memory_parts: Bytes of the memory, by what they are for.
        reasons: Mesh axis -> why the step waits for it.
        share: Part of the batch on a device, in words; empty to leave it out.
        note: Caveat on these devices; empty for none.
        compute_note: Part of the computing, in words.
        load: Further line of text about the step; empty for none.
        details: Further entries of `as_json`.
    """

    run: PlannedRun
    memory: PlannedMemory
    time: StepTime
    model_flops: float
    layout_text: str
    how_to_run: str
    memory_parts: Mapping[str, float]
    reasons: Mapping[str, str]
    share: str = ""
    note: str = ""
    compute_note: str = ""
    load: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.time.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak of all devices in that time."""
        cluster = self.run.cluster
        peak_flops = cluster.device.peak_flops[self.run.layout.precision]
        return self.model_flops / (peak_flops * cluster.num_devices * self.step_s)

    @property
    def fits(self) -> bool:
        """True if the fullest device has enough memory."""
        return self.memory.total_bytes <= self.run.cluster.device.usable_bytes

    def why_exposed(self, mesh_axis: str) -> str:
        """Return the reason why the step waits for a mesh axis."""
        return self.reasons[mesh_axis]

    def as_json(self) -> dict[str, Any]:
        """Return one of the `plans` of `meshpar plan --json`."""
        return {
            "layout": str(self.run.layout),
            "step_s": self.step_s,
            "mfu": self.mfu,
            "fits": self.fits,
            "time": self.time.as_json(),
            **self.details,
        }

    @property
    def lines(self) -> list[str]:
        """Lines of text: memory, time, and what the step waits for."""
        time, run, device = self.time, self.run, self.run.cluster.device
        parts = (
            f"{name} {gigabytes(size)}" for name, size in self.memory_parts.items()
        )
        share = f": {self.share}" if self.share else ""
        return [
            f"layout {self.layout_text}{share}",
            f"memory {gigabytes(self.memory.total_bytes)} of "
            f"{gigabytes(device.memory_bytes)}: "
            f"{'fits' if self.fits else 'does not fit'}",
            *([f"  {self.note}"] if self.note else []),
            f"  {', '.join(parts)}",
            f"step {milliseconds(self.step_s)}, MFU {self.mfu:.1%}: computing "
            f"{milliseconds(time.compute_s)}{self.compute_note}, optimizer "
            f"{milliseconds(time.optimizer_s)}",
            *([f"  {self.load}"] if self.load else []),
            *(
                f"  exposed on {axis} ({run.link(axis).name}) {milliseconds(seconds)}: "
                f"{self.reasons[axis]}"
                for axis, seconds in time.exposed_s.items()
            ),
        ]


@runtime_checkable
class PlanRequest(Protocol):
    """A model that is no transformer, on devices, with constraints."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def global_batch(self) -> int: ...

    @property
    def capacity_bytes(self) -> float:
        """Bytes of a device that a plan may fill."""

    @property
    def heading(self) -> str:
        """The model and the machine, in a line."""

    @property
    def name(self) -> str:
        """Name of the model."""

    @property
    def noun(self) -> str:
        """Name of its examples."""

    @property
    def note(self) -> str:
        """Caveat about all plans; empty for none."""

    def on(self, cluster: Cluster, global_batch: int) -> PlanRequest:
        """Return the same request on other devices."""

    def plans(self) -> Sequence[Plan]:
        """Return all plans that fit, the fastest first."""

    def kept_plan(self) -> tuple[Plan, bool]:
        """Return the plan of the layout that is kept, and True if it fits."""
