"""Search: the layouts that fit, fastest first, and why each of the others does not do.

Every layout of the space is considered. Most are rejected by a bound that the estimate
cannot fall below, and only the others are estimated, those of the lowest bound first;
so what is returned is what estimating all of them would give.
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any, NamedTuple

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.planner.bounds import Bound, Bounds
from meshpar.planner.estimate import Estimate, estimate_run
from meshpar.planner.execution import MESHPAR, Execution
from meshpar.planner.hardware import Cluster
from meshpar.planner.memory import memory_of
from meshpar.planner.refusals import layout_problems
from meshpar.planner.rejection import Rejected, reason_of
from meshpar.planner.run import Run
from meshpar.planner.space import (
    BUILT_AXES,
    Choices,
    Constraints,
    Variant,
    choices_of,
    mesh_layouts,
)
from meshpar.planner.workload import Workload

_NUM_PLANS = 10
_MOST_VARIANTS = 1 << 32
_NO_VARIANT = (
    "what is kept leaves no way to run it: microbatches must divide a replica's "
    "sequences, and chunks the layers of a stage"
)
_SAMPLE = 8
"""Rejected layouts of each kind that a result shows."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found.

    Args:
        plans: The fastest layouts that fit, best first.
        front: Those that no other beats in both time and memory, fastest first.
        rejected: Some of the others, each with its reason.
        rejected_count: How many others there are.
        considered_count: Layouts in all.
        estimated_count: Those of them that no bound settled.
        seconds: Time of the search.
        notes: What the reader must know of the plans.
    """

    plans: tuple[Estimate, ...]
    front: tuple[Estimate, ...]
    rejected: tuple[Rejected, ...]
    rejected_count: int
    considered_count: int
    estimated_count: int
    seconds: float
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """What `meshpar plan --json` prints."""
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
                {"layout": str(other.layout), "reason": other.reason}
                for other in self.rejected
            ],
            "rejected_count": self.rejected_count,
            "considered_count": self.considered_count,
            "estimated_count": self.estimated_count,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }


class _Leaf(NamedTuple):
    """One layout, or all of a mesh shape, that no structural reason forbids.

    Args:
        bound: What it takes at least.
        order: When it was met.
        mesh: Its mesh shape.
        variant: How that is run; None for all its variants.
        choices: Those.
    """

    bound: Bound
    order: int
    mesh: Layout
    variant: Variant | None
    choices: Choices

    @property
    def count(self) -> int:
        """Of layouts."""
        return self.choices.count if self.variant is None else 1

    @property
    def some_variant(self) -> Variant:
        """The first of its variants."""
        return self.variant or next(self.choices.variants())


@dataclass(kw_only=True)
class _Findings:
    """What is known while the search goes on."""

    capacity_bytes: float
    num_plans: int
    refused: list[Rejected] = field(default_factory=list)
    too_large: list[_Leaf] = field(default_factory=list)
    too_slow: list[_Leaf] = field(default_factory=list)
    fitting: list[tuple[float, int, int, Estimate]] = field(default_factory=list)
    front: list[tuple[float, float]] = field(default_factory=list)

    @property
    def considered(self) -> int:
        """Layouts in all."""
        settled = sum(leaf.count for leaf in (*self.too_large, *self.too_slow))
        return len(self.refused) + settled + len(self.fitting)

    @property
    def slowest_plan_s(self) -> float:
        """Of the plans so far; infinite while there are too few."""
        if len(self.fitting) < self.num_plans:
            return float("inf")
        return self.fitting[self.num_plans - 1][0]

    def useless(self, step_s: float, memory_bytes: float) -> bool:
        """Whether something known is as fast and as small, and plans are faster."""
        return step_s > self.slowest_plan_s and any(
            other_s <= step_s and other_bytes <= memory_bytes
            for other_s, other_bytes in self.front
        )

    def keep(self, found: Estimate, order: int) -> None:
        """Adds a layout that fits."""
        insort(self.fitting, (found.step_s, _num_axes(found), order, found))
        point = (found.step_s, found.memory.total_bytes)
        if not any(s <= point[0] and size <= point[1] for s, size in self.front):
            self.front = [
                (s, size) for s, size in self.front if s < point[0] or size < point[1]
            ]
            insort(self.front, point)


def search(
    workload: Workload,
    cluster: Cluster,
    *,
    global_batch: int,
    seq: int | None = None,
    execution: Execution = MESHPAR,
    constraints: Constraints | None = None,
    num_plans: int = _NUM_PLANS,
) -> SearchResult:
    """The fastest layouts that fit, those small for their speed, and why not others.

    Args:
        workload: What is trained.
        cluster: On what.
        global_batch: Sequences in a step.
        seq: Tokens of one; the workload's own when absent.
        execution: The program that runs it.
        constraints: What may be chosen; everything that a step lays out by default.
        num_plans: Plans to return.

    Raises:
        InputError: A count below 1, or constraints that no layout meets.

    Example:
        >>> from meshpar.planner.clusters import cluster_of
        >>> from meshpar.planner.shapes import SHAPES
        >>> found = search(
        ...     SHAPES["llama3-8b"],
        ...     cluster_of("h100-80gb", devices=8),
        ...     global_batch=16,
        ...     seq=8192,
        ... )
        >>> found.plans[0].fits, found.considered_count > 100
        (True, True)
    """
    started = time.perf_counter()
    constraints = constraints or Constraints()
    for name, count in (("global_batch", global_batch), ("num_plans", num_plans)):
        if count < 1:
            raise InputError(f"{name}={count}: must be at least 1")
    like = Run(
        workload=workload,
        cluster=cluster,
        layout=Layout(),
        execution=execution,
        global_batch=global_batch,
        seq=seq or workload.seq,
        stage_blocks=(workload.layers,),
    )
    bounds = Bounds(like)
    findings = _Findings(
        capacity_bytes=capacity_bytes(cluster, constraints), num_plans=num_plans
    )
    leaves = _meshes(like, constraints, bounds, findings)
    heapify(leaves)
    while leaves:
        _consider(heappop(leaves), bounds, findings, leaves)
    return _result(like, constraints, bounds, findings, started)


def capacity_bytes(cluster: Cluster, constraints: Constraints) -> float:
    """Memory of a device that a plan may fill."""
    own = cluster.device.memory_bytes
    return min(own, constraints.max_memory_bytes or own)


def _meshes(
    like: Run, constraints: Constraints, bounds: Bounds, findings: _Findings
) -> list[_Leaf]:
    """The mesh shapes that can be, each with the bound of all its variants."""
    leaves, size = [], {"global_batch": like.global_batch, "seq": like.seq}
    for order, mesh in enumerate(mesh_layouts(like.cluster.num_devices, constraints)):
        problems = layout_problems(like.workload, _plain(mesh), **size)
        choices = choices_of(like.workload, mesh, constraints, **size)
        if problems or not choices.count:
            reason = problems[0].message if problems else _NO_VARIANT
            findings.refused.append(Rejected(mesh, reason))
        else:
            bound = bounds.of_mesh(mesh, choices)
            leaves.append(_Leaf(bound, order, mesh, None, choices))
    if not leaves and not findings.refused:
        raise InputError(_no_mesh(like, constraints))
    return leaves


def _plain(mesh: Layout) -> Layout:
    """The mesh alone: how it is run is not its fault."""
    return Layout(**mesh.mesh_shape, attention=mesh.attention)


def _no_mesh(like: Run, constraints: Constraints) -> str:
    words = [f"{key}={value}" for key, value in constraints.kept.items()]
    words += [f"{axis} forbidden" for axis in sorted(constraints.forbidden)]
    return (
        f"no layout of {like.cluster.num_devices} devices has {', '.join(words)}; keep "
        "sizes that multiply to a divisor of the devices, or leave another axis free"
    )


def _consider(
    leaf: _Leaf, bounds: Bounds, findings: _Findings, leaves: list[_Leaf]
) -> None:
    """Settles a leaf, or opens it: its variants join the others."""
    if leaf.bound.memory_bytes > findings.capacity_bytes:
        findings.too_large.append(leaf)
    elif findings.useless(*leaf.bound):
        findings.too_slow.append(leaf)
    elif leaf.variant is None:
        for order, variant in enumerate(leaf.choices.variants()):
            bound = bounds.bound(leaf.mesh, variant)
            order = leaf.order * _MOST_VARIANTS + order
            heappush(leaves, _Leaf(bound, order, leaf.mesh, variant, leaf.choices))
    else:
        _settle(leaf, bounds.run(leaf.mesh, leaf.variant), bounds, findings)


def _settle(leaf: _Leaf, run: Run, bounds: Bounds, findings: _Findings) -> None:
    memory_bytes = bounds.memory_bytes(run)
    if memory_bytes <= findings.capacity_bytes and not findings.useless(
        leaf.bound.step_s, memory_bytes
    ):
        memory_bytes = memory_of(run).total_bytes
    if memory_bytes > findings.capacity_bytes:
        findings.too_large.append(leaf)
    elif findings.useless(leaf.bound.step_s, memory_bytes):
        findings.too_slow.append(leaf)
    else:
        findings.keep(estimate_run(run), leaf.order)


def _num_axes(found: Estimate) -> int:
    return sum(size > 1 for size in found.run.layout.mesh_shape.values())


def _result(
    like: Run,
    constraints: Constraints,
    bounds: Bounds,
    findings: _Findings,
    started: float,
) -> SearchResult:
    fitting = [found for *_, found in findings.fitting]
    plans = tuple(fitting[: findings.num_plans])
    points = dict.fromkeys(findings.front)
    front = []
    for found in fitting:
        point = (found.step_s, found.memory.total_bytes)
        if points.pop(point, 0) is None:
            front.append(found)
    kept = {str(found.run.layout) for found in (*plans, *front)}
    others = [found for found in fitting if str(found.run.layout) not in kept]
    return SearchResult(
        plans=plans,
        front=tuple(front),
        rejected=_sample(bounds, findings, plans, others),
        rejected_count=findings.considered - len(kept),
        considered_count=findings.considered,
        estimated_count=len(findings.fitting),
        seconds=time.perf_counter() - started,
        notes=_notes(like, constraints),
    )


def _sample(
    bounds: Bounds,
    findings: _Findings,
    plans: tuple[Estimate, ...],
    others: list[Estimate],
) -> tuple[Rejected, ...]:
    """Those that would have been fastest, of every kind of reason."""
    slowest = plans[-1] if plans else None
    near = [found.run for found in others[:_SAMPLE]]
    for leaves in (findings.too_large, findings.too_slow):
        near += [
            bounds.run(leaf.mesh, leaf.some_variant)
            for leaf in sorted(_one_of_each(leaves), key=lambda leaf: leaf[:2])[
                :_SAMPLE
            ]
        ]
    reasons = [
        Rejected(run.layout, reason_of(run, findings.capacity_bytes, slowest))
        for run in near
    ]
    first_of = {refused.reason.split()[0]: refused for refused in findings.refused}
    return (*reasons, *islice(first_of.values(), _SAMPLE))


def _one_of_each(leaves: list[_Leaf]) -> list[_Leaf]:
    """The one of the lowest bound of every split of the model."""
    best: dict[tuple[int, ...], _Leaf] = {}
    for leaf in leaves:
        mesh = leaf.mesh
        key = (mesh.stage, mesh.context, mesh.expert, mesh.tensor)
        if key not in best or leaf.bound.step_s < best[key].bound.step_s:
            best[key] = leaf
    return list(best.values())


def _notes(like: Run, constraints: Constraints) -> tuple[str, ...]:
    notes = []
    if constraints.planned:
        notes.append(
            "plans may use 'context' and 'expert', which make_train_step does not lay "
            f"out yet: those that can run have {', '.join(BUILT_AXES)} alone"
        )
    elif like.workload.experts:
        notes.append(
            f"{like.workload.name} has experts, but 'expert' is not among the mesh "
            "axes that make_train_step lays out, so that all its devices have all "
            "experts; --planned considers it"
        )
    return tuple(notes)
