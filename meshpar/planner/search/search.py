"""Search: the layouts that fit, fastest first, and why each of the others is no plan.

Every layout of the space is considered. Lower bounds reject most of them, and only the
others are estimated, those of the lowest bound first; so the plans are those that
estimating all of them would give.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import islice

from meshpar.errors import InputError
from meshpar.layout import MESH_AXES, Layout
from meshpar.planner.cost.estimate import Estimate
from meshpar.planner.cost.parts import check_execution, crossing_problems
from meshpar.planner.cost.run import Run
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.execution import MESHPAR, Execution, execution_for
from meshpar.planner.search.bounds import LayoutBounds
from meshpar.planner.search.candidates import (
    FRONT_REACH,
    Findings,
    Leaf,
    rejected,
    settle,
)
from meshpar.planner.search.choices import (
    MeshChoices,
    mesh_choices,
    searched_meshes,
)
from meshpar.planner.search.method import why_method
from meshpar.planner.search.mixed import run_bounds
from meshpar.planner.search.result import Rejected, SearchResult, guess_note
from meshpar.planner.search.space import Constraints, State
from meshpar.planner.workload.problems import (
    check_precision_on,
    layout_problems,
    problems_on_any_mesh,
    with_mtp,
)
from meshpar.planner.workload.workload import Workload

_NUM_PLANS = 10
_MOST_PLANS = 1000
_NO_VARIANT = (
    "what is kept leaves no way to run it: microbatches must divide a replica's "
    "sequences, chunks the layers of a stage, and both suit the schedule"
)
_DECIDED = (*MESH_AXES, "attention", "zero", "zero_axes", "sync_every")
"""Keys of a layout that its mesh shape decides; its variants have the others."""

_SAMPLE = 8
"""Rejected layouts of each kind that a result shows."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model, a machine and a batch to find a layout for.

    Args:
        workload: The model.
        cluster: The devices.
        global_batch: Sequences in a step.
        seq: Tokens of a sequence; 0 for the workload's own.
        execution: The program that runs it.
        constraints: Limits of the search.

    Raises:
        InputError: A count below 1 or beyond any run, more tokens than positions,
            residuals kept that no block names, or mixed hardware for a program of
            others.
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
        check_execution(self.cluster, self.execution)
        asked = {"remat", "precision"} & self.constraints.kept.keys()
        kept = Layout(**{key: self.constraints.kept[key] for key in asked})
        batch = {"global_batch": self.global_batch, "seq": self.run.seq}
        for problem in problems_on_any_mesh(
            self.workload, kept, self.execution, **batch
        ):
            raise problem.error()
        check_precision_on(self.cluster.device, kept.precision)

    noun, note = "sequences", ""

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.workload.name

    def on(self, cluster: Cluster, global_batch: int) -> Request:
        """Return the request on other devices."""
        return replace(self, cluster=cluster, global_batch=global_batch)

    def search(
        self, *, num_plans: int = _NUM_PLANS, plans_only: bool = False
    ) -> SearchResult:
        """Find the fastest layouts that fit, and say why the others do not."""
        return search(self, num_plans=num_plans, plans_only=plans_only)

    @property
    def capacity_bytes(self) -> float:
        """Memory of a device that a plan may fill."""
        return self.constraints.capacity_bytes(self.cluster.device)

    @property
    def run(self) -> Run:
        """Run that has everything but the layout."""
        return Run(
            workload=self.workload,
            cluster=self.cluster,
            layout=Layout(),
            execution=execution_for(self.workload, self.execution),
            global_batch=self.global_batch,
            seq=self.seq or self.workload.seq,
            stage_blocks=with_mtp(self.workload, (self.workload.layers,)),
        )


def search(
    request: Request, *, num_plans: int = _NUM_PLANS, plans_only: bool = False
) -> SearchResult:
    """Find the fastest layouts that fit, those small for their speed, and say why.

    Or, in less time, the fastest alone (`plans_only`).

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
    findings = Findings(
        capacity_bytes=capacity, num_plans=num_plans, wants_front=not plans_only
    )
    bounds = run_bounds(request.run, capacity)
    leaves, refused = possible_meshes(request, bounds)
    findings.refused += refused
    settle(leaves, bounds, findings)
    return _result(request, bounds, findings, started)


def possible_meshes(
    request: Request, bounds: LayoutBounds
) -> tuple[list[Leaf], list[Rejected]]:
    """Return mesh shapes with the bound of all their variants, and those refused."""
    like, constraints = request.run, request.constraints
    refused = []
    groups: dict[tuple, tuple[Layout, list[State]]] = {}
    allowed = constraints
    if not like.workload.experts and "expert" not in constraints.kept:
        # Only experts are split over it.
        forbidden = constraints.forbidden | {"expert"}
        allowed = replace(constraints, forbidden=forbidden)
    for mesh in searched_meshes(like, allowed):
        problems = [
            *crossing_problems(like.cluster, mesh),
            *layout_problems(
                like.workload,
                Layout(**{key: getattr(mesh, key) for key in _DECIDED}),
                global_batch=like.global_batch,
                seq=like.seq,
                execution=like.execution,
            ),
        ]
        if problems:
            refused.append(Rejected(mesh, problems[0].message, problems[0].key))
            continue
        parts = [*mesh_choices(like, mesh, constraints).groups()]
        if not parts:
            refused.append(Rejected(mesh, _NO_VARIANT, "plan.no_way_to_run"))
        for part in parts:
            _, states = groups.setdefault(_group_key(like, mesh, part), (mesh, []))
            states += part.states
    leaves = [
        Leaf.of(order, mesh, choices._replace(states=tuple(states)), bounds)
        for order, ((*_, choices), (mesh, states)) in enumerate(groups.items())
    ]
    if not leaves and not refused:
        raise InputError(_no_mesh(like, constraints), key="plan.no_such_layout")
    return leaves, refused


def _group_key(like: Run, mesh: Layout, choices: MeshChoices) -> tuple:
    """Return what the layouts of a leaf share: all but how replicas keep states.

    Between kinds of devices links depend on how replicas lie, too.
    """
    outside = (mesh.data, mesh.fsdp, mesh.zero_axes) if like.cluster.parts else ()
    inside = (mesh.stage, mesh.context, mesh.expert, mesh.tensor, mesh.attention)
    return outside, inside, choices._replace(states=())


def _no_mesh(like: Run, constraints: Constraints) -> str:
    words = [f"{key}={value}" for key, value in constraints.kept.items()]
    words += [f"{axis} forbidden" for axis in sorted(constraints.forbidden)]
    return (
        f"no layout of {like.cluster.num_devices} devices has {', '.join(words)}; keep "
        "sizes that multiply to a divisor of the devices, or leave another axis free"
    )


def _result(
    request: Request,
    bounds: LayoutBounds,
    findings: Findings,
    started: float,
) -> SearchResult:
    fitting = [found for *_, found in findings.fitting]
    plans = tuple(fitting[: findings.num_plans])
    points = dict.fromkeys(findings.front if findings.wants_front else ())
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
    rejected = _sample(bounds, findings, plans, others) if findings.wants_front else ()
    notes = [guess_note(request.cluster.device)]
    notes += [why_method(plan.run.layout, plan.run) for plan in plans[:1]]
    return SearchResult(
        plans=plans,
        front=tuple(front),
        rejected=rejected,
        rejected_count=findings.considered - len(kept),
        considered_count=findings.considered,
        estimated_count=len(findings.fitting),
        seconds=time.perf_counter() - started,
        capacity_bytes=findings.capacity_bytes,
        notes=tuple(filter(None, notes)),
    )


def _sample(
    bounds: LayoutBounds,
    findings: Findings,
    plans: tuple[Estimate, ...],
    others: list[Estimate],
) -> tuple[Rejected, ...]:
    """Return the rejected layouts with the lowest bounds, for every kind of reason."""
    slowest = plans[-1] if plans else None
    near = [found.run for found in others[:_SAMPLE]]
    for leaves in (
        _timed(findings.too_large, bounds.without_capacity()),
        findings.too_slow,
    ):
        near += [
            bounds.run(leaf.mesh, leaf.some_variant)
            for leaf in sorted(_one_per_split(leaves), key=lambda leaf: leaf[:2])[
                :_SAMPLE
            ]
        ]
    reasons = [rejected(run, findings.capacity_bytes, slowest) for run in near]
    first_of = {refused.reason.split()[0]: refused for refused in findings.refused}
    return (*reasons, *islice(first_of.values(), _SAMPLE))


def _timed(leaves: list[Leaf], bounds: LayoutBounds) -> list[Leaf]:
    """Return one too large layout of every mesh shape with the bound of its time.

    The first of each keeps most and is fastest.
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


def _one_per_split(leaves: list[Leaf]) -> list[Leaf]:
    """Return the leaf of the lowest bound for every split of the model."""
    best: dict[tuple[int, ...], Leaf] = {}
    for leaf in leaves:
        mesh = leaf.mesh
        key = (mesh.stage, mesh.context, mesh.expert, mesh.tensor)
        if key not in best or leaf.bound.step_s < best[key].bound.step_s:
            best[key] = leaf
    return list(best.values())
