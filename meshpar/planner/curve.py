"""Scaling curve: efficiency as devices are added, and what is lost.

On every number of devices the fastest plan is taken. With d the devices' seconds that a
sequence costs, `step_s * devices / global_batch`, and d0 the least of them on any
number,

    efficiency = d0 / d

The parts of a step add up to it, so what each of them takes more than there, over d,
adds up to `1 - efficiency`: that says why. Few devices may lose to what their memory
asks for; where more devices lose, the curve bends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshpar.errors import InputError
from meshpar.planner.cost.step_time import COMPUTING, EXPOSED
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.mixed import check_one_kind
from meshpar.planner.plan import Plan, gigabytes
from meshpar.planner.search.result import PlanRequest

BATCHES = ("strong", "weak")
"""The same batch on all devices, or the same part of it on each."""

BEND = 0.9
"""Efficiency below which a curve has bent: a tenth of the devices is lost."""

_WHY = {
    COMPUTING: "matmuls are smaller, or more is computed again",
    "bubble": "stages have fewer microbatches to wait with",
    "optimizer": "fewer devices share out the states, or each updates as many",
    "stragglers": "more devices wait for the slowest of all",
    "host": "what is moved to the host, and between steps, does not shrink",
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """The fastest plan on some devices.

    Args:
        cluster: The devices.
        global_batch: Examples in a step.
        plan: The plan; None where nothing fits.
        problem: Reason why nothing fits.
        efficiency: Examples per second and device, relative to the best point.
        lost: Part of the step -> additional share of the devices' time that it takes;
            these add up to `1 - efficiency`.
    """

    cluster: Cluster
    global_batch: int
    plan: Plan | None = None
    problem: str = ""
    efficiency: float = 0.0
    lost: Mapping[str, float]

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.cluster.num_devices

    @property
    def most_lost(self) -> str:
        """Part of a step that loses most; empty for none."""
        worst = max(self.lost, key=self.lost.__getitem__, default="")
        return worst if worst and self.lost[worst] > 0 else ""

    @property
    def why(self) -> str:
        """Reason for `most_lost`, in words."""
        if self.plan is None or not self.most_lost:
            return ""
        axis = self.most_lost.removeprefix(EXPOSED)
        if axis in _WHY:
            return _WHY[axis]
        link = self.plan.run.link(axis)
        return f"over the {link.name}, {self.plan.run.why_exposed(axis)}"

    def as_json(self) -> dict[str, Any]:
        """Return an entry of `points` of `meshpar plan --curve --json`."""
        plan = self.plan
        point = {"devices": self.num_devices, "global_batch": self.global_batch}
        if plan is None:
            return {**point, "fits": False, "problem": self.problem}
        return {
            **point,
            "fits": True,
            "layout": plan.run.layout_text,
            "step_s": plan.step_s,
            "sequences_per_s": self.global_batch / plan.step_s,
            "examples_per_s": self.global_batch / plan.step_s,
            "mfu": plan.mfu,
            "total_bytes": round(plan.memory.total_bytes),
            "efficiency": self.efficiency,
            "lost": dict(self.lost),
        }


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points from the fewest devices to the most.

    Args:
        batch: `strong` or `weak`.
        points: One for each number of devices.
        noun: Name of the examples.
        note: Caveat about the plans; empty for none.
    """

    batch: str
    points: tuple[Point, ...]
    noun: str = "sequences"
    note: str = ""

    @property
    def fitting(self) -> tuple[Point, ...]:
        """Points with a plan."""
        return tuple(point for point in self.points if point.plan is not None)

    @property
    def best(self) -> Point | None:
        """Point of the highest efficiency, or None."""
        return max(self.fitting, key=lambda point: point.efficiency, default=None)

    @property
    def bend(self) -> Point | None:
        """First point of more devices with an efficiency below `BEND`, or None."""
        if self.best is None:
            return None
        more = self.fitting[self.fitting.index(self.best) + 1 :]
        return next((point for point in more if point.efficiency < BEND), None)

    def as_json(self) -> dict[str, Any]:
        """Return the `curve` of `meshpar plan --curve --json`."""
        bend = self.bend
        return {
            "batch": self.batch,
            "examples": self.noun,
            "note": self.note or None,
            "points": [point.as_json() for point in self.points],
            "bend": bend
            and {
                "devices": bend.num_devices,
                "efficiency": bend.efficiency,
                "most_lost": bend.most_lost,
                "lost": bend.lost[bend.most_lost],
                "why": bend.why,
            },
        }


def scaling_curve(request: PlanRequest, batch: str = "strong") -> Curve:
    """Return the curve up to a request's devices, their number halved repeatedly.

    Args:
        request: Model, machine, batch and constraints on the most devices.
        batch: `strong` for the request's batch everywhere, `weak` for the same number
            of examples per device.

    Raises:
        InputError: There is no such kind of batch.

    Example:
        >>> from meshpar.planner.machine.clusters import cluster_of
        >>> from meshpar.planner.search.search import Request
        >>> from meshpar.planner.workload.shapes import workload_of
        >>> request = Request(
        ...     workload=workload_of("dit-b2"),
        ...     cluster=cluster_of("h100-80gb", devices=2),
        ...     global_batch=64,
        ... )
        >>> [point.num_devices for point in scaling_curve(request).points]
        [1, 2]
    """
    if batch not in BATCHES:
        raise InputError(
            f"batch={batch!r}: must be one of {', '.join(BATCHES)}",
            key="plan.unknown_batch_kind",
        )
    check_one_kind(request.cluster, "a scaling curve takes half as many, and so on, of")
    most = request.cluster.num_devices
    points: list[Point] = []
    for cluster in reversed(list(_halves(request.cluster))):
        examples = request.global_batch
        if batch == "weak":
            examples, left = divmod(examples * cluster.num_devices, most)
            if left or not examples:
                continue
        points.append(_planned(request, cluster, examples))
    fitting = [point for point in points if point.plan is not None]
    if fitting:
        base = min(fitting, key=lambda point: sum(_parts(point).values()))
        points = [_compared(point, base) for point in points]
    return Curve(
        batch=batch, points=tuple(points), noun=request.noun, note=request.note
    )


def curve_in_words(curve: Curve) -> list[str]:
    """Return lines of text: a table, then where and why the curve bends."""
    lines = [
        f"{'devices':>8} {'batch':>7} {curve.noun + '/s':>12} {'efficiency':>11}  "
        "most of what is lost, and the layout"
    ]
    for point in curve.points:
        counts = f"{point.num_devices:>8,} {point.global_batch:>7,}"
        if point.plan is None:
            lines.append(f"{counts} {'':>12} {'':>11}  {point.problem}")
            continue
        rate = point.global_batch / point.plan.step_s
        worst = point.most_lost
        lost = f"{point.lost[worst]:.1%} {worst}; " if worst else ""
        lines.append(
            f"{counts} {rate:>12,.4g} {point.efficiency:>11.1%}  "
            f"{lost}{point.plan.run.layout_text}"
        )
    return [*lines, bend_in_words(curve), *([curve.note] if curve.note else [])]


def bend_in_words(curve: Curve) -> str:
    """Return a sentence that says where and why the curve bends."""
    best, bend = curve.best, curve.bend
    if best is None:
        return "nothing fits on any of these"
    if bend is None:
        return (
            f"no bend: beyond {best.num_devices:,} devices, where each does most, at "
            f"least {BEND:.0%} of it is left"
        )
    return (
        f"bends at {bend.num_devices:,} devices: each does {bend.efficiency:.1%} of "
        f"what one of {best.num_devices:,} does; {bend.lost[bend.most_lost]:.1%} of "
        f"the time is more {bend.most_lost}: {bend.why}"
    )


def _halves(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the cluster, half of it, and so on, in whole hosts and slices."""
    yield cluster
    if cluster.hosts > 1:
        hosts = cluster.hosts // 2 if cluster.hosts % 2 == 0 else 1
        yield from _halves(replace(cluster, hosts=hosts))
    elif cluster.torus:
        at = max(range(len(cluster.torus)), key=lambda at: cluster.torus[at])
        if cluster.torus[at] % 2 == 0:
            sizes = [*cluster.torus]
            sizes[at] //= 2
            torus = tuple(sorted(sizes))
            # As many devices as its chips have.
            yield from _halves(replace(cluster, torus=torus, devices_per_host=0))
    elif cluster.devices_per_host % 2 == 0:
        each = cluster.devices_per_host // 2
        yield from _halves(replace(cluster, devices_per_host=each))


def _planned(request: PlanRequest, cluster: Cluster, examples: int) -> Point:
    """Return the point of the fastest plan, or of the reason why there is none."""
    place: dict[str, Any] = {"cluster": cluster, "global_batch": examples}
    try:
        found = request.on(cluster, examples).search(num_plans=1, plans_only=True)
    except InputError as error:
        return Point(**place, problem=str(error), lost={})
    if not found.plans:
        problem = f"nothing fits in {gigabytes(found.capacity_bytes)}"
        return Point(**place, problem=problem, lost={})
    return Point(**place, plan=found.plans[0], lost={})


def _compared(point: Point, base: Point) -> Point:
    """Compare a point with the one of the lowest cost."""
    if point.plan is None:
        return point
    before, now = _parts(base), _parts(point)
    total = sum(now.values())
    lost = {
        name: (now.get(name, 0.0) - before.get(name, 0.0)) / total
        for name in {**before, **now}
    }
    return replace(point, efficiency=sum(before.values()) / total, lost=lost)


def _parts(point: Point) -> dict[str, float]:
    """Device seconds per example, by part of the step."""
    if point.plan is None:
        return {}
    each = point.num_devices / point.global_batch
    return {name: seconds * each for name, seconds in point.plan.time.parts.items()}
