"""Search: the layouts that fit, fastest first, and why each of the others does not do.

Every layout of the space is considered. Most are rejected by a bound that the estimate
cannot fall below, and only the others are estimated, those of the lowest bound first;
so what is returned is what estimating all of them would give.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.planner.cost.estimate import Estimate
from meshpar.planner.cost.run import Run
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.execution import MESHPAR, Execution
from meshpar.planner.search.bounds import Bounds
from meshpar.planner.search.candidates import FRONT_REACH, Findings, Leaf, settle
from meshpar.planner.search.constraints import Constraints
from meshpar.planner.search.context_method import why_method, with_method
from meshpar.planner.search.mesh_choices import choices_of
from meshpar.planner.search.refusals import layout_problems, whatever_the_mesh
from meshpar.planner.search.rejection import Rejected, rejected
from meshpar.planner.search.space import mesh_layouts
from meshpar.planner.workload.workload import Workload

_NUM_PLANS = 10
_MOST_PLANS = 1000
_NO_VARIANT = (
    "what is kept leaves no way to run it: microbatches must divide a replica's "
    "sequences, chunks the layers of a stage, and both suit the schedule"
)
_SAMPLE = 8
"""Rejected layouts of each kind that a result shows."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found.

    Args:
        plans: The fastest layouts that fit, best first.
        front: Those that no other beats in both time and memory, fastest first, up to
            1.5 times the fastest plan's time.
        rejected: Some of the others, each with its reason.
        rejected_count: How many others there are.
        considered_count: Layouts in all.
        estimated_count: Those of them that no bound settled.
        seconds: Time of the search.
        capacity_bytes: What a plan may fill of a device.
        notes: What the reader must know of the plans.
    """

    plans: tuple[Estimate, ...]
    front: tuple[Estimate, ...]
    rejected: tuple[Rejected, ...]
    rejected_count: int
    considered_count: int
    estimated_count: int
    seconds: float
    capacity_bytes: float
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
                {"layout": str(other.layout), "reason": other.reason, "key": other.key}
                for other in self.rejected
            ],
            "rejected_count": self.rejected_count,
            "considered_count": self.considered_count,
            "estimated_count": self.estimated_count,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be laid out.

    Args:
        workload: What is trained.
        cluster: On what.
        global_batch: Sequences in a step.
        seq: Tokens of one; the workload's own when 0.
        execution: The program that runs it.
        constraints: What may be chosen; everything that a step lays out by default.

    Raises:
        InputError: A count below 1 or beyond any run, more tokens than positions, or
            residuals kept that no block names.
    """

    workload: Workload
    cluster: Cluster
    global_batch: int
    seq: int = 0
    execution: Execution = MESHPAR
    constraints: Constraints = Constraints()

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise InputError(
                f"global_batch={self.global_batch}: must be at least 1",
                key="value.below_one",
            )
        kept = Layout(remat=self.constraints.kept.get("remat", "none"))
        batch = {"global_batch": self.global_batch, "seq": self.run.seq}
        for problem in whatever_the_mesh(self.workload, kept, self.execution, **batch):
            raise InputError(problem.message, key=problem.fault)

    @property
    def capacity_bytes(self) -> float:
        """What a plan may fill of a device."""
        return self.constraints.capacity_bytes(self.cluster.device)

    @property
    def run(self) -> Run:
        """What all its layouts share, as a run of none of them."""
        return Run(
            workload=self.workload,
            cluster=self.cluster,
            layout=Layout(),
            execution=self.execution,
            global_batch=self.global_batch,
            seq=self.seq or self.workload.seq,
            stage_blocks=(self.workload.layers,),
        )


def search(request: Request, *, num_plans: int = _NUM_PLANS) -> SearchResult:
    """The fastest layouts that fit, those small for their speed, and why not others.

    Raises:
        InputError: Constraints that no layout of so many devices meets.

    Example:
        >>> from meshpar.planner.machine.clusters import cluster_of
        >>> from meshpar.planner.workload.shapes import SHAPES
        >>> cluster = cluster_of("h100-80gb", devices=8)
        >>> found = search(
        ...     Request(workload=SHAPES["llama3-8b"], cluster=cluster, global_batch=16)
        ... )
        >>> found.plans[0].fits, found.considered_count > 100
        (True, True)
    """
    started = time.perf_counter()
    if num_plans < 1:
        raise InputError(
            f"num_plans={num_plans}: must be at least 1", key="value.below_one"
        )
    if num_plans > _MOST_PLANS:
        raise InputError(
            f"num_plans={num_plans}: give at most {_MOST_PLANS}; each is estimated in "
            "full, where others are passed over by their bounds",
            key="plan.too_many_plans",
        )
    capacity = request.capacity_bytes
    findings = Findings(capacity_bytes=capacity, num_plans=num_plans)
    bounds = Bounds(request.run, capacity)
    leaves, refused = possible_meshes(request, bounds)
    findings.refused += refused
    settle(leaves, bounds, findings)
    return _result(request, bounds, findings, started)


def possible_meshes(
    request: Request, bounds: Bounds
) -> tuple[list[Leaf], list[Rejected]]:
    """The mesh shapes that can be, each with the bound of all its variants.

    And those that cannot, with the reason.
    """
    like, constraints = request.run, request.constraints
    size = {"global_batch": like.global_batch, "seq": like.seq}
    size_and_program: dict[str, Any] = {**size, "execution": like.execution}
    leaves, refused = [], []
    allowed = _without_idle_axes(constraints, like.workload)
    for order, mesh in enumerate(mesh_layouts(like.cluster.num_devices, allowed)):
        mesh = with_method(mesh, like, allowed)
        problems = layout_problems(like.workload, _plain(mesh), **size_and_program)
        choices = choices_of(like, mesh, constraints)
        if problems:
            refused.append(Rejected(mesh, problems[0].message, problems[0].fault))
        elif not choices.num_variants:
            refused.append(Rejected(mesh, _NO_VARIANT, "plan.no_way_to_run"))
        else:
            bound = bounds.least(mesh, choices)
            leaves.append(Leaf(bound, (order,), mesh, choices, choices.num_variants))
    if not leaves and not refused:
        raise InputError(_no_mesh(like, constraints), key="plan.no_such_layout")
    return leaves, refused


def _without_idle_axes(constraints: Constraints, workload: Workload) -> Constraints:
    """Those of a workload, whose experts alone `expert` splits."""
    if workload.experts or "expert" in constraints.kept:
        return constraints
    return replace(constraints, forbidden=constraints.forbidden | {"expert"})


def _plain(mesh: Layout) -> Layout:
    """The mesh alone: how it is run is not its fault."""
    sizes: dict[str, Any] = dict(mesh.mesh_shape)
    attention, zero, zero_axes = mesh.attention, mesh.zero, mesh.zero_axes
    how: dict[str, Any] = dict(attention=attention, zero=zero, zero_axes=zero_axes)
    return Layout(**sizes, **how, sync_every=mesh.sync_every)


def _no_mesh(like: Run, constraints: Constraints) -> str:
    words = [f"{key}={value}" for key, value in constraints.kept.items()]
    words += [f"{axis} forbidden" for axis in sorted(constraints.forbidden)]
    return (
        f"no layout of {like.cluster.num_devices} devices has {', '.join(words)}; keep "
        "sizes that multiply to a divisor of the devices, or leave another axis free"
    )


def _result(
    request: Request,
    bounds: Bounds,
    findings: Findings,
    started: float,
) -> SearchResult:
    fitting = [found for *_, found in findings.fitting]
    plans = tuple(fitting[: findings.num_plans])
    points = dict.fromkeys(findings.front)
    front = []
    reach_s = max([found.step_s for found in plans[-1:]], default=0.0)
    reach_s = max(reach_s, FRONT_REACH * fitting[0].step_s if fitting else 0.0)
    for found in fitting:
        if found.step_s > reach_s:
            break
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
        capacity_bytes=findings.capacity_bytes,
        notes=(*_notes(request), *_methods(plans)),
    )


def _methods(plans: tuple[Estimate, ...]) -> tuple[str, ...]:
    """Why the first plan crosses `context` as it does."""
    found = why_method(plans[0].run.layout, plans[0].run) if plans else ""
    return (found,) if found else ()


def _sample(
    bounds: Bounds,
    findings: Findings,
    plans: tuple[Estimate, ...],
    others: list[Estimate],
) -> tuple[Rejected, ...]:
    """Those that would have been fastest, of every kind of reason."""
    slowest = plans[-1] if plans else None
    near = [found.run for found in others[:_SAMPLE]]
    for leaves in (
        _timed(findings.too_large, bounds.without_capacity()),
        findings.too_slow,
    ):
        near += [
            bounds.run(leaf.mesh, leaf.some_variant)
            for leaf in sorted(_one_of_each(leaves), key=lambda leaf: leaf[:2])[
                :_SAMPLE
            ]
        ]
    reasons = [rejected(run, findings.capacity_bytes, slowest) for run in near]
    first_of = {refused.reason.split()[0]: refused for refused in findings.refused}
    return (*reasons, *islice(first_of.values(), _SAMPLE))


def _timed(leaves: list[Leaf], bounds: Bounds) -> list[Leaf]:
    """Of every mesh shape the first, which keeps most and is fastest, with its time.

    The search has found none of what is too large.
    """
    first: dict[int, Leaf] = {}
    for leaf in leaves:
        known = first.setdefault(leaf.order[0], leaf)
        if leaf.order < known.order:
            first[leaf.order[0]] = leaf
    return [
        leaf._replace(bound=bounds.bound(leaf.mesh, leaf.some_variant))
        for leaf in first.values()
    ]


def _one_of_each(leaves: list[Leaf]) -> list[Leaf]:
    """The one of the lowest bound of every split of the model."""
    best: dict[tuple[int, ...], Leaf] = {}
    for leaf in leaves:
        mesh = leaf.mesh
        key = (mesh.stage, mesh.context, mesh.expert, mesh.tensor)
        if key not in best or leaf.bound.step_s < best[key].bound.step_s:
            best[key] = leaf
    return list(best.values())


def _notes(request: Request) -> tuple[str, ...]:
    notes, device = [], request.cluster.device
    if device.taken_from:
        notes.append(
            f"no published step times calibrate {device.name}: it is taken to achieve "
            f"what {device.taken_from} achieves of its peaks, attention kernels "
            "included, so that its times are a guess; meshpar calibrate measures"
        )
    return tuple(notes)
