"""A row of the table of traffic: one collective, how often, and what may hide it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from meshpar.planner.cost.run import Run
from meshpar.planner.machine.collective_cost import collective_s
from meshpar.planner.machine.link import Link

HOST = "host"
"""Key of `Cost.exposed_s` for waits on the host's memory, which is no mesh axis."""


@dataclass(frozen=True)
class Cost:
    """Seconds of work on one device.

    Args:
        compute_s: Computing.
        exposed_s: Waiting for a collective that nothing hides, by mesh axis; for the
            host's memory as `HOST`.
        hidden_s: Of that computing, what already runs beside collectives.

    Example:
        >>> (Cost(1.0, {"tensor": 0.5}) * 2 + Cost(1.0)).total_s
        4.0
    """

    compute_s: float = 0.0
    exposed_s: Mapping[str, float] = field(default_factory=dict)
    hidden_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Both together."""
        return self.compute_s + sum(self.exposed_s.values())

    def __add__(self, other: Cost) -> Cost:
        exposed_s = dict(self.exposed_s)
        for mesh_axis, seconds in other.exposed_s.items():
            exposed_s[mesh_axis] = exposed_s.get(mesh_axis, 0.0) + seconds
        return Cost(
            self.compute_s + other.compute_s, exposed_s, self.hidden_s + other.hidden_s
        )

    def __mul__(self, times: float) -> Cost:
        return Cost(
            self.compute_s * times,
            {mesh_axis: s * times for mesh_axis, s in self.exposed_s.items()},
            self.hidden_s * times,
        )


HALVES = ("attention", "mlp")
"""Of a block: the backward of each has matmuls for its `inputs` and its `weights`."""

ATTENTION, ATTENTION_AGAIN, LAYER = "attention", "attention again", "layer"
BLOCKS, LAST_BACKWARD, NEXT_FORWARD = "blocks", "last backward", "next forward"
MATMULS = "matmuls"
"""Work that collectives run beside, where the execution overlaps them; and a half's
`attention outputs` (in the forward), `attention inputs`, `mlp weights`."""

SECONDS, BYTES = "seconds", "bytes"
"""The sum that alone counts a row."""


class Row(NamedTuple):
    """One collective.

    Args:
        mesh_axes: Whose devices take part together.
        kind: As XLA calls it.
        payload_bytes: Of the whole array: output of a gather, input of a scatter; of a
            permute, what is sent.
        reason: What it is for.
        passes: What runs it: a forward, a backward, a head, a hop up or down; once.
        times: How often each of those does.
        beside: The work that it can run beside; empty where there is none.
        share: Of its time, what can be hidden there at most.
        waits_on: The mesh axis that waiting for it counts for; its first when empty.
        members: Devices that take part, where not all of the mesh axes do.
        part: `inner` where devices next to each other take part alone, `outer` where
            one of each such group does; all of the mesh axes where empty.
        only: `SECONDS` or `BYTES`, where the other sum leaves it out.
    """

    mesh_axes: tuple[str, ...]
    kind: str
    payload_bytes: float
    reason: str
    passes: str
    times: int = 1
    beside: str = ""
    waits_on: str = ""
    members: int = 0
    part: str = ""
    only: str = ""
    share: float = 1.0


Rows = tuple[Row, ...]


def of_pass(rows: Rows, passes: str) -> Rows:
    """Those that such a pass runs."""
    return tuple(row for row in rows if row.passes == passes)


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
