"""Candidates in order of their bounds, and why each of them is no plan."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from heapq import heapify, heappop, heappush
from itertools import compress
from typing import NamedTuple

import numpy as np

from meshpar.layout import Layout
from meshpar.planner.cost.estimate import Estimate, estimate_run
from meshpar.planner.cost.memory import fullest_memory
from meshpar.planner.cost.run import Run
from meshpar.planner.plan import gigabytes, milliseconds
from meshpar.planner.search.bounds import Bound, BoundByRemat, LayoutBounds
from meshpar.planner.search.choices import MeshChoices
from meshpar.planner.search.result import Rejected
from meshpar.planner.search.space import Variant

FRONT_REACH = 1.5
"""Times the fastest plan's step, beyond which less memory is not worth it."""


_PLACES = ("microbatches", "states", "remats", "sequence_parallel", "schedules")
"""Keys whose values' places order the layouts of a group, of equal times."""


class Closeness(IntEnum):
    """Closeness of a bound, from the quickest to the closest, by what it counts.

    Blocks; also what fits in memory, so that blocks are computed again; and all else.
    """

    BLOCKS = 0
    MEMORY = 1
    ALL = 2


_OPENED_AT = {
    "sequence_parallel": Closeness.BLOCKS,
    "microbatches": Closeness.MEMORY,
}
"""Closeness of a bound from which a key is opened, if it is not the closest one."""


class Leaf(NamedTuple):
    """One or several layouts of a mesh shape that suits the workload.

    Args:
        bound: Least time and memory of any of them.
        order: Their place in the search: of their group, and of each key of `_PLACES`.
        mesh: A mesh shape that some of them have; others lie otherwise over `data` and
            `fsdp`.
        choices: Ways to run it.
        num_layouts: Number of the layouts.
        by_remat: Least time and memory with each remat policy.
        closeness: What their bound counts so far.
    """

    bound: Bound
    order: tuple[int, ...]
    mesh: Layout
    choices: MeshChoices
    num_layouts: int
    by_remat: BoundByRemat
    closeness: Closeness = Closeness.ALL

    @classmethod
    def of(
        cls, order: int, mesh: Layout, choices: MeshChoices, bounds: LayoutBounds
    ) -> Leaf:
        """Return the leaf of a group of choices of a mesh shape, bounded quickly."""
        places = (order, *(0,) * len(_PLACES))
        number, each = choices.num_variants, _quick_bound(mesh, choices, bounds)
        blocks = Closeness.BLOCKS
        return cls(each.least, places, mesh, choices, number, each, blocks)

    @property
    def is_closest(self) -> bool:
        """True if no bound of all of them is closer."""
        return self.closeness is Closeness.ALL

    @property
    def some_variant(self) -> Variant:
        """First of the ways to run the mesh shape."""
        return next(self.choices.variants())

    def parts(self, bounds: LayoutBounds) -> Iterator[Leaf]:
        """Yield the layouts in smaller leaves; at first in one with closer bounds."""
        key, mesh, known = self.choices.open_key, self.mesh, self.by_remat
        if self.closeness < _OPENED_AT.get(key, Closeness.ALL):
            closer = Closeness(self.closeness + 1)
            is_all = closer is Closeness.ALL
            bound = bounds.by_remat if is_all else bounds.in_memory
            each = bound(mesh, self.choices).at_least(known)
            yield self._replace(bound=each.least, by_remat=each, closeness=closer)
            return
        at = 1 + _PLACES.index(key)
        # Blocks of other microbatches are others than those of the whole.
        closeness = Closeness.BLOCKS if key in _OPENED_AT else Closeness.ALL
        for index, choices, number in self.choices.parts():
            if key == "remats":  # They are bounded already.
                each = known.only(slice(index, index + 1))
            elif closeness is Closeness.BLOCKS:
                each = _quick_bound(mesh, choices, bounds).at_least(known)
            else:
                each = bounds.by_remat(mesh, choices).at_least(known)
            place = self.order[at] + index
            order = (*self.order[:at], place, *self.order[at + 1 :])
            yield Leaf(each.least, order, mesh, choices, number, each, closeness)

    def only(self, mask: np.ndarray) -> Leaf:
        """Return the layouts of some remat policies."""
        every, each = self.choices.remats, self.by_remat.only(mask)
        choices = self.choices._replace(remats=tuple(compress(every, mask)))
        number = self.num_layouts * len(choices.remats) // len(every)
        return self._replace(
            bound=each.least, choices=choices, num_layouts=number, by_remat=each
        )


def _quick_bound(
    mesh: Layout, choices: MeshChoices, bounds: LayoutBounds
) -> BoundByRemat:
    """Return the bound of these choices by their blocks alone, whatever the policy."""
    seconds = np.full(len(choices.remats), bounds.least_s(mesh, choices))
    return BoundByRemat(seconds, np.zeros(len(choices.remats)))


@dataclass(kw_only=True)
class Findings:
    """State of a search: layouts that fit, those that do not, and the front."""

    capacity_bytes: float
    num_plans: int
    wants_front: bool = True
    refused: list[Rejected] = field(default_factory=list)
    too_large: list[Leaf] = field(default_factory=list)
    too_slow: list[Leaf] = field(default_factory=list)
    fitting: list[tuple[float, int, tuple[int, ...], Estimate]] = field(
        default_factory=list
    )
    front: list[tuple[float, float]] = field(default_factory=list)

    @property
    def considered(self) -> int:
        """Number of layouts so far."""
        settled = sum(leaf.num_layouts for leaf in (*self.too_large, *self.too_slow))
        return len(self.refused) + settled + len(self.fitting)

    @property
    def slowest_plan_s(self) -> float:
        """Time of the slowest plan so far; infinite while there are too few."""
        if len(self.fitting) < self.num_plans:
            return float("inf")
        return self.fitting[self.num_plans - 1][0]

    def useless(self, bounds: BoundByRemat) -> np.ndarray:
        """Return True where the plans are faster, and so is a layout that is as small.

        Or the plans alone, if nothing asks for a front.
        """
        step_s, memory_bytes = bounds
        slow = step_s > self.slowest_plan_s
        if not (self.wants_front and slow.any()):
            return slow
        front_s, front_bytes = np.array(self.front).T
        # Of the front the slowest that is as fast is also the smallest.
        at = np.searchsorted(front_s, step_s, side="right") - 1
        smaller = (at >= 0) & (front_bytes[at] <= memory_bytes)
        return slow & ((step_s > FRONT_REACH * self.fitting[0][0]) | smaller)

    def sift(self, leaf: Leaf) -> Leaf | None:
        """Reject layouts that take too much memory or time; return the others."""
        if (
            leaf.closeness is Closeness.BLOCKS
            and leaf.bound.step_s <= self.slowest_plan_s
        ):
            return leaf
        large = leaf.by_remat.memory_bytes > self.capacity_bytes
        useless = self.useless(leaf.by_remat) & ~large
        for mask, rejected in ((large, self.too_large), (useless, self.too_slow)):
            if mask.all():
                rejected.append(leaf)
                return None
            if mask.any():
                rejected.append(leaf.only(mask))
        left = ~(large | useless)
        if left.all():
            return leaf
        return leaf.only(left) if left.any() else None

    def sift_one(self, leaf: Leaf, memory_bytes: float) -> bool:
        """Return False if a leaf of one layout, of so much memory, is rejected."""
        each = leaf.by_remat._replace(memory_bytes=np.array([memory_bytes]))
        return self.sift(leaf._replace(by_remat=each)) is not None

    def keep(self, plan: Estimate, order: tuple[int, ...]) -> None:
        """Add a layout that fits; of equal times fewer mesh axes come first."""
        sizes = tuple(plan.run.layout.mesh_shape.values())
        num_axes = sum(size > 1 for size in sizes)
        insort(self.fitting, (plan.step_s, num_axes, (*sizes, *order), plan))
        point = (plan.step_s, plan.memory.total_bytes)
        if not any(s <= point[0] and size <= point[1] for s, size in self.front):
            self.front = [
                (s, size) for s, size in self.front if s < point[0] or size < point[1]
            ]
            insort(self.front, point)


def settle(leaves: list[Leaf], bounds: LayoutBounds, findings: Findings) -> None:
    """Estimate or reject all leaves, those of the lowest bound first.

    A bound that rejects now rejects later too, since plans only become faster. So only
    parts of a leaf that no bound rejects join the others.
    """
    waiting = [left for leaf in leaves if (left := findings.sift(leaf))]
    heapify(waiting)
    while waiting:
        leaf = findings.sift(heappop(waiting))
        if leaf is None:
            continue
        if leaf.num_layouts == 1 and leaf.is_closest:
            run = bounds.run(leaf.mesh, leaf.some_variant)
            if run.splits_backward:
                run = fitted(run, findings.capacity_bytes)
            if findings.sift_one(leaf, bounds.memory_bytes(run)) and findings.sift_one(
                leaf, fullest_memory(run).total_bytes
            ):
                findings.keep(estimate_run(run), leaf.order)
            continue
        for part in leaf.parts(bounds):
            left = findings.sift(part)
            if left is not None:
                heappush(waiting, left)


def fitted(run: Run, capacity_bytes: float) -> Run:
    """Return the run with as many waiting weight gradients as fit, if they are split.

    Each waits with a stash. The run itself is returned if it fits, limits them already,
    or does not fit with one of them.
    """
    layout = run.layout
    if not run.splits_backward or layout.max_pending_w or run.execution.eager:
        return run
    memory, waiting = fullest_memory(run), run.pipeline_ticks.stash
    too_much = memory.total_bytes - capacity_bytes
    each = memory.stash_bytes / waiting
    limit = waiting - math.ceil(too_much / each) if each else 0
    if too_much <= 0 or limit < 1:
        return run
    return replace(run, layout=replace(layout, max_pending_w=limit))


def rejected(run: Run, capacity_bytes: float, slowest: Estimate | None) -> Rejected:
    """Say why a possible layout is no plan: it does not fit, or others are faster.

    Args:
        run: The layout.
        capacity_bytes: Memory of a device that a plan may fill.
        slowest: The slowest of the plans, if there are any.
    """
    plan = estimate_run(run)
    if plan.memory.total_bytes > capacity_bytes:
        why, key = too_large(plan, capacity_bytes), "plan.too_large"
    elif slowest is None or plan.step_s <= slowest.step_s:
        why = f"{milliseconds(plan.step_s)}: as good as a plan"
        key = "plan.as_good_as_a_plan"
    else:
        why, key = too_slow(plan, slowest), "plan.too_slow"
    return Rejected(run.layout, why, key)


def too_large(plan: Estimate, capacity_bytes: float) -> str:
    """Say what fills the memory: `activations 97 GB > 80 GB at stage 0: ...`."""
    memory, layout = plan.memory, plan.run.layout
    parts = _parts(plan)
    name, size, why = max(parts, key=lambda part: part[1])
    at = f" at stage {memory.stage}" if layout.stage > 1 else ""
    capacity = gigabytes(capacity_bytes)
    if size > capacity_bytes:
        return f"{name} {gigabytes(size)} > {capacity}{at}: {why}"
    rest = gigabytes(memory.total_bytes - size)
    return (
        f"{name} {gigabytes(size)} and all else {rest} = "
        f"{gigabytes(memory.total_bytes)} > {capacity}{at}: {why}"
    )


def _parts(plan: Estimate) -> tuple[tuple[str, float, str], ...]:
    memory, run = plan.memory, plan.run
    layout, shards = run.layout, run.layout.fsdp * run.layout.tensor
    count = f"{memory.in_flight:g}"
    plural = "" if count == "1" else "s"
    return (
        (
            "activations",
            memory.activation_bytes,
            f"{count} microbatch{'es' if plural else ''} of {run.microbatch} in flight "
            f"with remat={layout.remat}",
        ),
        (
            "stash",
            memory.stash_bytes,
            f"{memory.pending_w:g} weight gradients of a stage wait",
        ),
        (
            "parameters, gradients and optimizer state",
            memory.state_bytes,
            f"split over {shards * layout.stage * layout.expert} of "
            f"{layout.num_devices} devices",
        ),
        (
            "logits",
            memory.logit_bytes,
            f"{run.tokens} tokens of a microbatch over tensor={layout.tensor}",
        ),
        (
            "workspace",
            memory.workspace_bytes,
            f"what a tick makes anew of {run.tokens} tokens of a microbatch",
        ),
        (
            "gathered weights",
            memory.gathered_bytes,
            f"parameters whole or cast for use, over tensor={layout.tensor}",
        ),
    )


def too_slow(plan: Estimate, slowest: Estimate) -> str:
    """Say where time goes: `tensor=16 crosses hosts: 3.1 s exposed; 9 s > 4 s ...`."""
    cause, seconds, of_plan = max(
        _causes(plan, slowest), key=lambda cause: cause[1] - cause[2]
    )
    return (
        f"{cause} against {milliseconds(of_plan)}; a step takes "
        f"{milliseconds(plan.step_s)} > {milliseconds(slowest.step_s)} of the slowest "
        "plan"
    ).replace("{}", milliseconds(seconds))


def _causes(plan: Estimate, slowest: Estimate) -> list[tuple[str, float, float]]:
    """List causes with their times in both plans; `{}` stands for `plan`'s."""
    time, other, layout = plan.time, slowest.time, plan.run.layout
    causes = [
        (_crossing(plan, axis), seconds, other.exposed_s.get(axis, 0.0))
        for axis, seconds in time.exposed_s.items()
    ]
    bubble = (
        f"stage={layout.stage} with {layout.microbatches} microbatches waits {{}} in "
        "the bubble"
    )
    size = plan.run.microbatch
    computing = f"remat={layout.remat} with microbatches of {size} computes {{}}"
    return [
        *causes,
        (bubble, time.bubble_s, other.bubble_s),
        (computing, time.compute_s, other.compute_s),
        ("the optimizer takes {}", time.optimizer_s, other.optimizer_s),
    ]


def _crossing(plan: Estimate, mesh_axis: str) -> str:
    run = plan.run
    size = getattr(run.layout, mesh_axis)
    place = {
        "network": "crosses hosts",
        "host": "inside a host",
        "torus": "on the torus",
    }.get(run.link(mesh_axis).name, "on its devices")
    return f"{mesh_axis}={size} {place}: {{}} exposed"
