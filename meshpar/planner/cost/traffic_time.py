"""Seconds of traffic: what each row takes, and how much of it no work hides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from meshpar.planner.cost.cost import Cost
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.traffic_row import BYTES, Row
from meshpar.planner.machine.collective_cost import collective_s
from meshpar.planner.machine.link import Link

_NOTHING: Mapping[str, float] = {}


def row_s(run: Run, row: Row) -> float:
    """Time that a row takes in each of its passes; 0 where only bytes count."""
    if row.only == BYTES:
        return 0.0
    link = link_of(run, row)
    num_devices, count = members(run, row), 1
    if row.passes == "once" and run.execution.bucket_bytes:
        count = math.ceil(row.payload_bytes / run.execution.bucket_bytes)
    payload_bytes = row.payload_bytes / count
    seconds = collective_s(row.kind, payload_bytes, num_devices, link)
    return row.times * count * seconds


def link_of(run: Run, row: Row) -> Link:
    """What it runs on."""
    if not row.part:
        return run.link(*row.mesh_axes)
    [mesh_axis] = row.mesh_axes
    size = getattr(run.layout, mesh_axis)
    inner = row.members if row.part == "inner" else size // row.members
    return run.link_within(mesh_axis, inner, row.part)


def members(run: Run, row: Row) -> int:
    """Devices that take part."""
    return row.members or math.prod(getattr(run.layout, axis) for axis in row.mesh_axes)


def exposed(
    run: Run, rows: Iterable[Row], beside: Mapping[str, float] = _NOTHING
) -> Cost:
    """Waiting for rows one after another.

    Args:
        run: The run that they are of.
        rows: Of the same pass.
        beside: Seconds of the work that hides collectives, by the name that rows give
            it; rows that name the same share them.
    """
    left = dict(beside)
    exposed_s: dict[str, float] = {}
    beside_s = 0.0
    for row in rows:
        seconds = row_s(run, row)
        if row.beside in left:
            hidden_s = min(seconds * row.share, left[row.beside])
            left[row.beside] -= hidden_s
            seconds -= hidden_s
            beside_s += hidden_s
        mesh_axis = row.waits_on or row.mesh_axes[0]
        exposed_s[mesh_axis] = exposed_s.get(mesh_axis, 0.0) + seconds
    slowed_s = beside_s * run.cluster.device.efficiency.collective_cores
    return Cost(slowed_s, exposed_s, beside_s)
