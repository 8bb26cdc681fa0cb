"""Remedies: changes that make a layout fit, and hardware that makes a plan faster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from meshpar.errors import InputError
from meshpar.hardware.device import Device
from meshpar.layout import Layout
from meshpar.layout.context_method import CONTEXT_METHODS
from meshpar.planner.cost.estimate import Estimate, estimate, estimate_run
from meshpar.planner.cost.memory import fullest_memory
from meshpar.planner.cost.run import Run
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.mixed import joined
from meshpar.planner.plan import Plan, gigabytes, milliseconds
from meshpar.planner.search.candidates import too_large
from meshpar.planner.search.mixed import run_bounds
from meshpar.planner.search.search import Request, possible_meshes, search

_TRIED = 1000
"""Layouts, those of least bounds first, whose memory is computed exactly."""

_LEAST_GAIN = 0.01
"""Least fraction of the step or the memory that a reported option saves."""

_TIMES = (2, 4, 8, 16, 32, 64)
"""Factors by which the devices are multiplied, one after the other."""


class Change(NamedTuple):
    """A change of the request that makes a layout fit.

    Args:
        text: The change in words.
        layout: The layout that fits then.
    """

    text: str
    layout: Layout


def nearest_fit(request: Request) -> tuple[str, tuple[Change, ...]]:
    """Say why nothing fits, and list changes that each make something fit."""
    smallest = _smallest(request)
    if smallest is None:
        refused = possible_meshes(request, run_bounds(request.run))[1]
        why = f"no layout suits: {refused[0].reason}" if refused else "no layout suits"
    else:
        capacity = request.capacity_bytes
        why = (
            f"nothing fits in {gigabytes(capacity)}; the smallest layout is "
            f"{smallest.run.layout}: {too_large(smallest, capacity)}"
        )
    return why, tuple(_changes(request, smallest))


def _changes(request: Request, smallest: Estimate | None) -> Iterator[Change]:
    """Yield changes: constraints given up one by one, more devices, larger ones."""
    constraints = request.constraints
    for key, value in constraints.kept.items():
        kept = {name: kept for name, kept in constraints.kept.items() if name != key}
        fits = _fitting(replace(request, constraints=replace(constraints, kept=kept)))
        if fits is not None:
            now = getattr(fits.run.layout, key)
            yield Change(f"fits with {key}={now} instead of {value}", fits.run.layout)
    for axis in sorted(constraints.forbidden):
        forbidden = constraints.forbidden - {axis}
        freed = replace(constraints, forbidden=forbidden)
        fits = _fitting(replace(request, constraints=freed))
        if fits is not None:
            size = getattr(fits.run.layout, axis)
            yield Change(f"fits with {axis}={size} allowed", fits.run.layout)
    if constraints.max_memory_bytes is not None:
        fits = _fitting(
            replace(request, constraints=replace(constraints, max_memory_bytes=None))
        )
        if fits is not None:
            needs = gigabytes(fits.memory.total_bytes)
            yield Change(f"fits in {needs} of a device", fits.run.layout)
    for times in _TIMES:
        cluster = _multiplied(request.cluster, times)
        fits = _fitting(replace(request, cluster=cluster))
        if fits is not None:
            text = f"fits with {times}x devices ({cluster.num_devices})"
            yield Change(text, fits.run.layout)
            break
    if smallest is not None:
        needs = gigabytes(smallest.memory.total_bytes)
        yield Change(f"fits on devices of {needs}", smallest.run.layout)


def _multiplied(cluster: Cluster, times: int) -> Cluster:
    """Multiply the devices; a host is filled before there are more hosts."""
    if cluster.parts:
        return joined(*(_multiplied(part, times) for part in cluster.parts))
    device = cluster.device
    if not cluster.torus and cluster.hosts == 1:
        devices = cluster.devices_per_host * times
        if devices <= device.domain_devices:
            return replace(cluster, devices_per_host=devices)
        if devices % device.domain_devices == 0:
            hosts, each = devices // device.domain_devices, device.domain_devices
            return replace(cluster, hosts=hosts, devices_per_host=each)
    return replace(cluster, hosts=cluster.hosts * times)


def _fitting(request: Request) -> Estimate | None:
    """Return the fastest layout that fits; None if not even the smallest does."""
    smallest = _smallest(request)
    if smallest is None or smallest.memory.total_bytes > request.capacity_bytes:
        return None
    return search(request, num_plans=1, plans_only=True).plans[0]


def _smallest(request: Request) -> Estimate | None:
    """Return the layout of least memory; None if there is no layout."""
    bounds = run_bounds(request.run)
    meshes, _ = possible_meshes(request, bounds)
    waiting = [(leaf.bound.memory_bytes, leaf.order, leaf) for leaf in meshes]
    heapify(waiting)
    least, smallest = math.inf, None
    tried = 0
    while waiting and tried < _TRIED:
        bound, _, leaf = heappop(waiting)
        if bound >= least:
            break
        if leaf.num_layouts > 1 or not leaf.is_closest:
            for part in leaf.parts(bounds):
                heappush(waiting, (part.bound.memory_bytes, part.order, part))
            continue
        run, tried = bounds.run(leaf.mesh, leaf.some_variant), tried + 1
        total = fullest_memory(run).total_bytes
        if total < least:
            least, smallest = total, run
    return None if smallest is None else estimate_run(smallest)


class Sensitivity(NamedTuple):
    """Effect of one change of the hardware on a plan.

    Args:
        change: Property that is twice as good.
        step_s: Time of a step with it, under the same layout.
        faster: Fraction of the step's time that it saves.
    """

    change: str
    step_s: float
    faster: float

    @property
    def text(self) -> str:
        """Sentence such as `twice the network: 7.0% faster`."""
        return f"twice the {self.change}: {self.faster:.1%} faster"

    def as_json(self) -> dict[str, Any]:
        """Entry of `sensitivities` in `meshpar plan --json`."""
        return {"change": self.text, "step_s": self.step_s, "faster": self.faster}


def sensitivities(plan: Plan) -> tuple[Sensitivity, ...]:
    """Return the effect of doubling each number of the device, largest first.

    Example:
        >>> from meshpar.planner.machine.clusters import cluster_of
        >>> from meshpar.planner.cost.estimate import estimate
        >>> from meshpar.planner.workload.shapes import SHAPES
        >>> plan = estimate(
        ...     SHAPES["llama3-8b"],
        ...     cluster_of("h100-80gb", devices=64),
        ...     "fsdp=64,remat=full,precision=bf16",
        ...     global_batch=64,
        ...     seq=8192,
        ... )
        >>> sensitivities(plan)[0].change
        'peak FLOP/s'
    """
    links = "torus links" if plan.run.cluster.device.torus_dims else "in-host links"
    names = {
        "network": "network_bytes_per_s",
        links: "link_bytes_per_s",
        "memory bandwidth": "memory_bytes_per_s",
        "peak FLOP/s": "peak_flops",
    }
    seconds = {
        change: plan.step_on_s(partial(_doubled, name=name))
        for change, name in names.items()
    }
    effects = [
        Sensitivity(change, step_s, 1 - step_s / plan.step_s)
        for change, step_s in seconds.items()
    ]
    return tuple(sorted(effects, key=lambda effect: effect.step_s))


def _doubled(device: Device, name: str) -> Device:
    """Return the device with twice a number, or twice each number of a table."""
    value: Any = getattr(device, name)
    if isinstance(value, Mapping):
        doubled: dict[str, Any] = {name: {key: 2 * one for key, one in value.items()}}
    else:
        doubled = {name: 2 * value}
    return replace(device, **doubled)


_UNSEARCHED: tuple[tuple[str, Any], ...] = (
    ("param_dtype", "bf16_stochastic"),
    ("sync_every", 8),
    ("fsdp_prefetch", "on"),
    ("fsdp_prefetch", "off"),
    *(("attention", method) for method in CONTEXT_METHODS),
)
"""Values that no search tries unless they are kept: the first two change the update."""


def unsearched(plan: Plan) -> tuple[str, ...]:
    """Return a line for each option that no search tries and that would save 1 %.

    A line has the step and the memory of the plan's layout with the option and without.
    An option that does not fit is left out. Plans of grids and tables have no lines.
    """
    run, lines = plan.run, []
    if not isinstance(run, Run):
        return ()
    for key, value in _UNSEARCHED:
        try:
            other = estimate(
                run.workload,
                run.cluster,
                replace(run.layout, **{key: value}),
                global_batch=run.global_batch,
                seq=run.seq,
                execution=run.execution,
            )
        except InputError:  # This layout cannot have it.
            continue
        needed, other_needed = plan.memory.total_bytes, other.memory.total_bytes
        saved = max(1 - other.step_s / plan.step_s, 1 - other_needed / needed)
        if other.fits and saved >= _LEAST_GAIN:
            lines.append(
                f"not searched: {key}={value}: a step of {milliseconds(other.step_s)} "
                f"instead of {milliseconds(plan.step_s)}, "
                f"{gigabytes(other_needed)} instead of {gigabytes(needed)}"
            )
    return tuple(lines)
