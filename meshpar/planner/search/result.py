"""Result of a search for layouts, and the assumed numbers that it hangs on."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from meshpar.hardware.device import Device
from meshpar.hardware.devices import ASSUMED
from meshpar.html import element, table
from meshpar.layout import Layout
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.plan import Plan, gigabytes, milliseconds

_FACTORS = (1 / 1.25, 1.25)
_LEAST_GAIN = 0.01
_COMPARED = 5
"""Plans that are timed again, the fastest first."""

_WORDS = {
    "matmul": "matmuls achieve {} of the peak",
    "attention": "the attention kernel achieves {} of the peak with very large heads",
    "memory": "elementwise work achieves {} of the memory's bandwidth",
    "link": "collectives achieve {} of the links inside",
    "network": "collectives achieve {} of the network",
    "host": "copies achieve {} of the link to the host's memory",
}


class Assumption(NamedTuple):
    """A number of the device that was taken, not measured.

    Args:
        number: The number in words.
        at: The value at which another plan is the fastest; 0 if the number decides
            nothing.
        layout: That plan's layout.
        faster: Part of the step's time by which it is faster then.
    """

    number: str
    at: float = 0.0
    layout: str = ""
    faster: float = 0.0

    @property
    def decides(self) -> bool:
        """True if another plan would be the fastest at another value."""
        return bool(self.layout)

    @property
    def text(self) -> str:
        """Sentence that names the number, and what it decides."""
        if not self.decides:
            return f"assumed, not measured: {self.number}; it decides nothing here"
        return (
            f"assumed, not measured, and it decides: {self.number}; at {self.at:.2g} "
            f"the fastest is {self.layout}, by {self.faster:.1%}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return an entry of `assumptions` of `meshpar plan --json`."""
        return {**self._asdict(), "decides": self.decides}


def guess_note(device: Device) -> str:
    """Return a note that a device's times are a guess; empty if they are calibrated."""
    if not device.taken_from:
        return ""
    return (
        f"no published step times calibrate {device.name}: it is taken to achieve what "
        f"{device.taken_from} achieves of its peaks, attention kernels included, so "
        "that its times are a guess; meshpar calibrate measures"
    )


def assumptions(plans: Sequence[Plan]) -> tuple[Assumption, ...]:
    """Return the assumed numbers behind plans, those that decide first.

    Args:
        plans: Plans on one machine, the fastest first.
    """
    compared = plans[:_COMPARED]
    cluster = plans[0].run.cluster
    device, parts = cluster.device, cluster.parts or (cluster,)
    names = [name for part in parts for name in ASSUMED.get(part.device.name, ())]
    names = [*dict.fromkeys(names)]
    layouts = [plan.run.layout for plan in compared]
    offloads = any(one.residual_names and one.residual_names.offload for one in layouts)
    if offloads or any(one.optimizer_memory == "host" for one in layouts):
        names.append("host")
    found = [_tried(compared, device, name) for name in names]
    return tuple(sorted(found, key=lambda one: -one.faster))


def _tried(plans: Sequence[Plan], device: Device, name: str) -> Assumption:
    """Return an assumption with the plan that gains most at another value."""
    value = getattr(device.efficiency, name)
    found = Assumption(_WORDS[name].format(f"{value:g}"))
    for factor in _FACTORS:
        at = min(1.0, factor * value)
        changed = partial(_changed, name=name, value=at)
        first_s, *seconds = [plan.step_on_s(changed) for plan in plans]
        for plan, step_s in zip(plans[1:], seconds, strict=True):
            faster = 1 - step_s / first_s
            if faster >= max(_LEAST_GAIN, found.faster):
                found = found._replace(
                    at=at, layout=plan.run.layout_text, faster=faster
                )
    return found


def _changed(device: Device, name: str, value: float) -> Device:
    """Return the device with another value of an assumed number."""
    efficiency: Any = {name: value}
    return replace(device, efficiency=replace(device.efficiency, **efficiency))


class Rejected(NamedTuple):
    """A layout that is no plan.

    Args:
        layout: The layout.
        reason: Why, with the numbers that decide it.
        key: Stable name of the reason, like an `InputError`'s.
    """

    layout: Layout
    reason: str
    key: str


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search.

    Args:
        plans: The fastest layouts that fit, best first.
        front: Layouts that no other beats in both time and memory, fastest first, up to
            1.5 times the fastest plan's time.
        rejected: Some of the others, each with its reason.
        rejected_count: Number of the others.
        considered_count: Number of all layouts.
        estimated_count: Number of layouts that no bound rejected.
        seconds: Time of the search.
        capacity_bytes: Memory of a device that a plan may fill.
        notes: Caveats of the plans.
    """

    plans: tuple[Plan, ...]
    front: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    rejected_count: int
    considered_count: int
    estimated_count: int
    seconds: float
    capacity_bytes: float
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Object that `meshpar plan --json` prints."""
        return {
            "plans": [plan.as_json() for plan in self.plans],
            "front": [
                {
                    "layout": str(plan.run.layout),
                    "step_s": plan.step_s,
                    "total_bytes": round(plan.memory.total_bytes),
                }
                for plan in self.front
            ],
            "rejected": [
                {"layout": str(other.layout), "reason": other.reason, "key": other.key}
                for other in self.rejected
            ],
            "rejected_count": self.rejected_count,
            "considered_count": self.considered_count,
            "estimated_count": self.estimated_count,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    def _repr_html_(self) -> str:
        """Return a table of the plans, for a notebook."""
        rows = [
            (
                plan.run.layout_text,
                milliseconds(plan.step_s),
                f"{plan.mfu:.1%}",
                gigabytes(plan.memory.total_bytes),
            )
            for plan in self.plans
        ]
        heading = self.plans[0].run.heading if rows else "nothing fits"
        return element(heading, [table(["layout", "step", "MFU", "memory"], rows)])


class PlanRequest(Protocol):
    """A model, devices, a batch and constraints to find a layout for."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def global_batch(self) -> int: ...

    @property
    def capacity_bytes(self) -> float:
        """Bytes of a device that a plan may fill."""

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

    def search(self, *, num_plans: int = 10, plans_only: bool = False) -> SearchResult:
        """Find the fastest layouts that fit, and say why the others do not.

        Args:
            num_plans: Most plans of the result.
            plans_only: Whether the result may lack its front, and what was rejected.
        """


def ranked(
    plans: Sequence[Plan], capacity_bytes: float, num_plans: int, started: float
) -> SearchResult:
    """Return the result of a search that estimates every layout.

    Args:
        plans: Plans of all layouts, those too large among them.
        capacity_bytes: Memory of a device that a plan may fill.
        num_plans: Most plans of the result.
        started: `time.perf_counter()` at its start.
    """
    every = sorted(plans, key=lambda plan: plan.step_s)
    fitting = [plan for plan in every if plan.memory.total_bytes <= capacity_bytes]
    chosen, least, front, rejected = fitting[:num_plans], math.inf, [], []
    for plan in fitting:
        if plan.memory.total_bytes < least:
            front.append(plan)
            least = plan.memory.total_bytes
    for plan in every:
        layout, size = plan.run.layout, plan.memory.total_bytes
        if size > capacity_bytes:
            why = f"memory {gigabytes(size)} > {gigabytes(capacity_bytes)}"
            rejected.append(Rejected(layout, why, "plan.too_large"))
        elif plan in fitting[num_plans:]:
            took, least_s = milliseconds(plan.step_s), milliseconds(chosen[-1].step_s)
            why = f"a step takes {took} > {least_s} of the slowest plan"
            rejected.append(Rejected(layout, why, "plan.too_slow"))
    return SearchResult(
        plans=tuple(chosen),
        front=tuple(front),
        rejected=tuple(rejected),
        rejected_count=len(rejected),
        considered_count=len(every),
        estimated_count=len(every),
        seconds=time.perf_counter() - started,
        capacity_bytes=capacity_bytes,
    )
