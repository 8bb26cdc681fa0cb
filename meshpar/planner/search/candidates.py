"""Candidates: layouts in order of their bounds, each settled or opened in turn."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from meshpar.layout import Layout
from meshpar.planner.cost.estimate import Estimate, estimate_run
from meshpar.planner.cost.memory import fullest_memory
from meshpar.planner.cost.run import Run
from meshpar.planner.search.bounds import Bound, Bounds
from meshpar.planner.search.mesh_choices import MeshChoices
from meshpar.planner.search.rejection import Rejected
from meshpar.planner.search.space import Variant

FRONT_REACH = 1.5
"""Times the fastest plan's step, beyond which less memory is not worth it."""


class Leaf(NamedTuple):
    """One layout, or several of a mesh shape, that no structural reason forbids.

    Args:
        bound: What it takes at least.
        order: When it was met.
        mesh: Its mesh shape.
        choices: How that may be run.
        num_layouts: How many they are.
    """

    bound: Bound
    order: tuple[int, ...]
    mesh: Layout
    choices: MeshChoices
    num_layouts: int

    @property
    def some_variant(self) -> Variant:
        """The first of its variants."""
        return next(self.choices.variants())

    def parts(self, bounds: Bounds) -> Iterator[Leaf]:
        """The same layouts apart."""
        mesh = self.mesh
        for index, (choices, number) in enumerate(self.choices.parts()):
            bound, order = bounds.least(mesh, choices), (*self.order, index)
            yield Leaf(bound, order, mesh, choices, number)


@dataclass(kw_only=True)
class Findings:
    """What is known while the search goes on."""

    capacity_bytes: float
    num_plans: int
    refused: list[Rejected] = field(default_factory=list)
    too_large: list[Leaf] = field(default_factory=list)
    too_slow: list[Leaf] = field(default_factory=list)
    fitting: list[tuple[float, int, tuple[int, ...], Estimate]] = field(
        default_factory=list
    )
    front: list[tuple[float, float]] = field(default_factory=list)

    @property
    def considered(self) -> int:
        """Layouts in all."""
        settled = sum(leaf.num_layouts for leaf in (*self.too_large, *self.too_slow))
        return len(self.refused) + settled + len(self.fitting)

    @property
    def slowest_plan_s(self) -> float:
        """Of the plans so far; infinite while there are too few."""
        if len(self.fitting) < self.num_plans:
            return float("inf")
        return self.fitting[self.num_plans - 1][0]

    def useless(self, step_s: float, memory_bytes: float) -> bool:
        """Whether plans are faster, and so is something known that is as small."""
        if step_s <= self.slowest_plan_s:
            return False
        return step_s > FRONT_REACH * self.fitting[0][0] or any(
            other_s <= step_s and other_bytes <= memory_bytes
            for other_s, other_bytes in self.front
        )

    def reject(self, leaf: Leaf, memory_bytes: float) -> bool:
        """Whether so much memory or its bound's time is too much; it is noted then."""
        if memory_bytes > self.capacity_bytes:
            self.too_large.append(leaf)
        elif self.useless(leaf.bound.step_s, memory_bytes):
            self.too_slow.append(leaf)
        else:
            return False
        return True

    def keep(self, found: Estimate, order: tuple[int, ...]) -> None:
        """Adds a layout that fits."""
        insort(self.fitting, (found.step_s, _num_axes(found), order, found))
        point = (found.step_s, found.memory.total_bytes)
        if not any(s <= point[0] and size <= point[1] for s, size in self.front):
            self.front = [
                (s, size) for s, size in self.front if s < point[0] or size < point[1]
            ]
            insort(self.front, point)


def settle(leaves: list[Leaf], bounds: Bounds, findings: Findings) -> None:
    """Settles all leaves, those of the lowest bound first.

    What a bound settles now, it settles later too: plans only become faster. So the
    parts of a leaf join the others only where none does.
    """
    waiting = [
        leaf for leaf in leaves if not findings.reject(leaf, leaf.bound.memory_bytes)
    ]
    heapify(waiting)
    while waiting:
        leaf = heappop(waiting)
        if findings.reject(leaf, leaf.bound.memory_bytes):
            continue
        if leaf.num_layouts == 1:
            run = bounds.run(leaf.mesh, leaf.some_variant)
            _settle(leaf, run, bounds, findings)
            continue
        for part in leaf.parts(bounds):
            if not findings.reject(part, part.bound.memory_bytes):
                heappush(waiting, part)


def _settle(leaf: Leaf, run: Run, bounds: Bounds, findings: Findings) -> None:
    if findings.reject(leaf, bounds.memory_bytes(run)):
        return
    if not findings.reject(leaf, fullest_memory(run).total_bytes):
        findings.keep(estimate_run(run), leaf.order)


def _num_axes(found: Estimate) -> int:
    return sum(size > 1 for size in found.run.layout.mesh_shape.values())
