"""Result of a search for layouts, and what every request for one has."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from meshpar.html import element, table
from meshpar.layout import Layout
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.plan import Plan, gigabytes, milliseconds


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

    def search(self, *, num_plans: int = 10) -> SearchResult:
        """Find the fastest layouts that fit, and say why the others do not."""


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
