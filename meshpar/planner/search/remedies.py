"""Nearest fit: where nothing fits, the smallest layout and what would make one fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from meshpar.layout import Layout
from meshpar.planner.cost.estimate import Estimate, estimate_run, gigabytes
from meshpar.planner.cost.memory import fullest_memory
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.search.bounds import Bounds
from meshpar.planner.search.rejection import too_large
from meshpar.planner.search.search import Request, possible_meshes, search

_TRIED = 1000
"""Layouts, those of least bounds first, whose memory is found exactly."""

_TIMES = (2, 4, 8, 16, 32, 64)
"""As many devices, one after the other."""


class Change(NamedTuple):
    """A change of what was asked that makes a layout fit.

    Args:
        text: What to change.
        layout: What fits then.
    """

    text: str
    layout: Layout


def nearest_fit(request: Request) -> tuple[str, tuple[Change, ...]]:
    """Why nothing fits, and changes each of which alone makes something fit."""
    smallest = _smallest(request)
    if smallest is None:
        refused = possible_meshes(request, Bounds(request.run))[1]
        why = f"no layout suits: {refused[0].reason}" if refused else "no layout suits"
    else:
        capacity = request.capacity_bytes
        why = (
            f"nothing fits in {gigabytes(capacity)}; the smallest layout is "
            f"{smallest.run.layout}: {too_large(smallest, capacity)}"
        )
    return why, tuple(_changes(request, smallest))


def _changes(request: Request, smallest: Estimate | None) -> Iterator[Change]:
    """Constraints given up one by one; more devices, or larger ones."""
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
    yield from _more_devices(request)
    if smallest is not None:
        needs = gigabytes(smallest.memory.total_bytes)
        yield Change(f"fits on devices of {needs}", smallest.run.layout)


def _more_devices(request: Request) -> Iterator[Change]:
    for times in _TIMES:
        cluster = _times(request.cluster, times)
        fits = _fitting(replace(request, cluster=cluster))
        if fits is not None:
            text = f"fits with {times}x devices ({cluster.num_devices})"
            yield Change(text, fits.run.layout)
            return


def _times(cluster: Cluster, times: int) -> Cluster:
    """As many times the devices: a host is filled before there are more hosts."""
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
    """The fastest layout that fits; None if not even the smallest does."""
    smallest = _smallest(request)
    if smallest is None or smallest.memory.total_bytes > request.capacity_bytes:
        return None
    return search(request, num_plans=1).plans[0]


def _smallest(request: Request) -> Estimate | None:
    """The layout of least memory; None without any."""
    bounds = Bounds(request.run)
    meshes, _ = possible_meshes(request, bounds)
    waiting = [(leaf.bound.memory_bytes, leaf.order, leaf) for leaf in meshes]
    heapify(waiting)
    least, smallest = math.inf, None
    tried = 0
    while waiting and tried < _TRIED:
        bound, _, leaf = heappop(waiting)
        if bound >= least:
            break
        if leaf.num_layouts > 1:
            for part in leaf.parts(bounds):
                heappush(waiting, (part.bound.memory_bytes, part.order, part))
            continue
        run, tried = bounds.run(leaf.mesh, leaf.some_variant), tried + 1
        total = fullest_memory(run).total_bytes
        if total < least:
            least, smallest = total, run
    return None if smallest is None else estimate_run(smallest)
