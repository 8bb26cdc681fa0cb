"""How much of the communication lies beside matmuls in the scheduled program.

A collective is hidden as far as matmuls stand between its start and its done, in the
order in which the compiler scheduled them. A second of matmul hides a second of one
collective over the same mesh axes, not of two. What has no start and done hides
nothing. Seconds are those of the planner's table of devices and links.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from meshpar.audit.collectives import Collective, callers_of
from meshpar.audit.hlo import Computation, Instruction, Program
from meshpar.audit.target import Target
from meshpar.audit.work import Matmuls, Work
from meshpar.collective_kinds import KINDS
from meshpar.hardware.devices import TARGETS
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.collective_cost import collective_s

_DONE = "async-collective-done"
_STEP = "async_collective_fusion"
_SYNCHRONOUS = '"is_sync":true'


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A collective, and the matmuls between its start and its done.

    Args:
        line: Of the collective in the text of the program.
        matmul_flops: Of one execution.
        matmul_bytes: Of their operands and results.
        wire_s: Seconds of the collective; None where the device has no table.
        hidden_s: Those of them beside a matmul.
    """

    line: int
    matmul_flops: int = 0
    matmul_bytes: int = 0
    wire_s: float | None = None
    hidden_s: float | None = None

    @property
    def is_hidden(self) -> bool:
        """Whether matmuls beside it take at least as long; some, without a table."""
        if self.wire_s is None or self.hidden_s is None:
            return self.matmul_flops > 0
        return self.matmul_flops > 0 and self.hidden_s >= self.wire_s * (1 - 1e-9)


@dataclass(frozen=True, kw_only=True)
class OverlapTotal:
    """One run's collectives of a kind over the same mesh axes, per device.

    Args:
        mesh_axes: As a collective's.
        kind: Of the collectives.
        wire_bytes: What each device sends.
        hidden_bytes: Of those collectives that matmuls hide wholly.
        wire_s: Seconds of all; None where the device has no table.
        hidden_s: Those beside matmuls.
    """

    mesh_axes: tuple[str, ...] | None
    kind: str
    wire_bytes: int
    hidden_bytes: int
    wire_s: float | None
    hidden_s: float | None

    @property
    def exposed_s(self) -> float | None:
        """Seconds that no matmul hides."""
        if self.wire_s is None or self.hidden_s is None:
            return None
        return self.wire_s - self.hidden_s

    @property
    def hidden_share(self) -> float:
        """Of the bytes sent, those that matmuls hide."""
        return self.hidden_bytes / self.wire_bytes if self.wire_bytes else 0.0


def cluster_of_target(target: Target | None) -> Cluster | None:
    """The machine that a target names; None of one without a table, as of CPUs."""
    if target is None:
        return None
    device = TARGETS.get(f"{target.platform}:{target.chip}")
    if device is None:
        return None
    if device.torus_dims:
        return Cluster(device=device, torus=target.shape)
    hosts, devices_per_host = target.shape
    return Cluster(device=device, hosts=hosts, devices_per_host=devices_per_host)


def overlaps_of(
    program: Program,
    rows: Iterable[Collective],
    mesh_shape: Mapping[str, int],
    cluster: Cluster | None,
) -> dict[int, Overlap]:
    """Line of each collective -> what lies beside it.

    Args:
        program: The scheduled program.
        rows: Its collectives.
        mesh_shape: Size of each mesh axis, outermost first.
        cluster: The machine; None where no table has it.
    """
    matmuls = Matmuls(program, None if cluster is None else cluster.device)
    return {
        overlap.line: overlap
        for name, windows in windows_of(program, rows).items()
        for overlap in _beside(
            program.computations[name], windows, matmuls, mesh_shape, cluster
        )
    }


def windows_of(program: Program, rows: Iterable[Collective]) -> dict[str, list[Window]]:
    """Name of a computation -> where its collectives start and are waited for."""
    starts = dict(_starts(program))
    sites: dict[str, list[Window]] = {}
    for row in rows:
        computation, start = starts[row.line]
        first = computation.instructions.index(_sent(computation, start))
        last = _done(computation, start)
        window = Window(row, start, first, first if last is None else last)
        sites.setdefault(computation.name, []).append(window)
    return sites


def overlap_totals(
    rows: Iterable[Collective], overlaps: Mapping[int, Overlap]
) -> tuple[OverlapTotal, ...]:
    """One row for each kind of collective over each product of mesh axes."""
    groups: dict[tuple[tuple[str, ...] | None, str], list[Collective]] = {}
    for row in rows:
        groups.setdefault((row.mesh_axes, row.kind), []).append(row)
    overlaps = defaultdict(lambda: Overlap(line=0), overlaps)
    return tuple(
        OverlapTotal(
            mesh_axes=mesh_axes,
            kind=kind,
            wire_bytes=sum(row.executions * row.wire_bytes for row in group),
            hidden_bytes=sum(
                row.executions * row.wire_bytes
                for row in group
                if overlaps[row.line].is_hidden
            ),
            wire_s=_sum((row.executions, overlaps[row.line].wire_s) for row in group),
            hidden_s=_sum(
                (row.executions, overlaps[row.line].hidden_s) for row in group
            ),
        )
        for (mesh_axes, kind), group in groups.items()
    )


def _sum(seconds: Iterable[tuple[int, float | None]]) -> float | None:
    total = 0.0
    for times, each in seconds:
        if each is None:
            return None
        total += times * each
    return total


@dataclass(frozen=True)
class Window:
    """A collective's start and done: positions in its computation."""

    row: Collective
    start: Instruction
    first: int
    last: int

    @property
    def lane(self) -> tuple[object, ...]:
        """What is done one after another: over the same devices, the same way."""
        pairs = self.start.attribute(r"source_target_pairs=(\{\{.*?\}\})")
        return self.row.mesh_axes, pairs


def _starts(program: Program) -> Iterator[tuple[int, tuple[Computation, Instruction]]]:
    """Line of a collective -> the instruction that starts it, or its wrapper."""
    callers = callers_of(program)
    for computation in program.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode.removesuffix("-start") in KINDS:
                itself = (computation, instruction)
                yield instruction.line, callers.get(computation.name, itself)


def _sent(computation: Computation, start: Instruction) -> Instruction:
    """Where its operands are given: of a prepared start, the update that has them."""
    if start.opcode != "custom-call-start" or start.operands:
        return start
    for user in computation.instructions:
        if start.name in user.operands and user.opcode == "custom-call-update":
            return user
    return start


def _done(computation: Computation, start: Instruction) -> int | None:
    """Where it is waited for; None of what is not asynchronous."""
    if _SYNCHRONOUS in start.attributes:
        return None
    names = {start.name}
    for at, user in enumerate(computation.instructions):
        if not names & set(user.operands):
            continue
        if user.opcode.endswith("-done") or user.name.startswith(_DONE):
            return at
        callee = user.attribute(r"calls=%?([\w.\-]+)") or ""
        passes = ("get-tuple-element", "tuple", "bitcast")
        goes_on = user.opcode in passes or user.opcode.endswith("-update")
        if goes_on or callee.startswith(_STEP):
            names.add(user.name)
    return None


def _beside(
    computation: Computation,
    windows: Iterable[Window],
    matmuls: Matmuls,
    mesh_shape: Mapping[str, int],
    cluster: Cluster | None,
) -> Iterator[Overlap]:
    lanes: dict[tuple[object, ...], _Lane] = defaultdict(_Lane)
    for window in sorted(windows, key=lambda window: window.last):
        instructions = computation.instructions[window.first + 1 : window.last]
        works = {
            each.name: work
            for each in instructions
            if (work := matmuls.of(computation, each)).flops
        }
        overlap = Overlap(
            line=window.row.line,
            matmul_flops=sum(work.flops for work in works.values()),
            matmul_bytes=sum(work.num_bytes for work in works.values()),
        )
        if cluster is not None:
            wire_s = wire_s_of(window.row, mesh_shape, cluster)
            hidden_s = lanes[window.lane].hide(works, wire_s)
            overlap = replace(overlap, wire_s=wire_s, hidden_s=hidden_s)
        yield overlap


@dataclass
class _Lane:
    """Matmul seconds already taken by collectives that run one after another."""

    taken: dict[str, float] = field(default_factory=dict)

    def hide(self, works: Mapping[str, Work], seconds: float) -> float:
        """Takes so many seconds of the matmuls, the earliest first; what it got."""
        hidden = 0.0
        for name, work in works.items():
            left = work.seconds - self.taken.get(name, 0.0)
            here = min(left, seconds - hidden)
            self.taken[name] = self.taken.get(name, 0.0) + here
            hidden += here
        return hidden


def wire_s_of(
    row: Collective, mesh_shape: Mapping[str, int], cluster: Cluster
) -> float:
    """Seconds of one execution; of groups that are no product, as over all devices."""
    mesh_axes = tuple(mesh_shape) if row.mesh_axes is None else row.mesh_axes
    link = cluster.link_of(mesh_shape, mesh_axes)
    # A program says itself where it all-reduces instead.
    link = replace(link, scatters_whole=False)
    members = math.prod(mesh_shape[axis] for axis in mesh_axes)
    return collective_s(row.kind, row.payload_bytes, members, link)
