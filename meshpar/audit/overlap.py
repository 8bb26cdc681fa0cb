"""Communication that matmuls hide in the scheduled program, in total and over time.

A collective is hidden as far as matmuls stand between its start and its done, in the
order in which the compiler scheduled them. A second of matmul hides a second of one
collective over the same mesh axes, not of two. A collective without start and done
hides nothing. Seconds come from the table of devices and links. Elementwise work takes
no time here, so a collective may look exposed that an elementwise kernel hides.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from meshpar.audit.collectives import (
    Collective,
    axes_text,
    cut_mesh_axis,
    wrapping_instructions,
)
from meshpar.audit.flops import Matmuls, Work
from meshpar.audit.flow import places
from meshpar.audit.hlo import Computation, Instruction, Program
from meshpar.audit.target import Target
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
        """True if its matmuls take as long; without a table, if there are any."""
        if self.wire_s is None or self.hidden_s is None:
            return self.matmul_flops > 0
        return self.matmul_flops > 0 and self.hidden_s >= self.wire_s * (1 - 1e-9)


@dataclass(frozen=True, kw_only=True)
class OverlapTotal:
    """One run's collectives of a kind over the same mesh axes, per device.

    Args:
        mesh_axes: `Collective.along`.
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
        """Share of the bytes sent that matmuls hide, 0 to 1."""
        return self.hidden_bytes / self.wire_bytes if self.wire_bytes else 0.0


def target_cluster(target: Target | None) -> Cluster | None:
    """Return the machine that a target names; None without a table, as of CPUs."""
    if target is None:
        return None
    device = TARGETS.get(f"{target.platform}:{target.chip}")
    if device is None:
        return None
    if device.torus_dims:
        return Cluster(device=device, torus=target.shape)
    hosts, devices_per_host = target.shape
    return Cluster(device=device, hosts=hosts, devices_per_host=devices_per_host)


def find_overlaps(
    program: Program,
    rows: Iterable[Collective],
    mesh_shape: Mapping[str, int],
    cluster: Cluster | None,
) -> dict[int, Overlap]:
    """Return the overlap of each collective, by its line.

    Args:
        program: The scheduled program.
        rows: Its collectives.
        mesh_shape: Size of each mesh axis, outermost first.
        cluster: The machine; None where no table has it.
    """
    matmuls = Matmuls(program, None if cluster is None else cluster.device)
    return {
        overlap.line: overlap
        for name, windows in collective_windows(program, rows).items()
        for overlap in _beside(
            program.computations[name], windows, matmuls, mesh_shape, cluster
        )
    }


def collective_windows(
    program: Program, rows: Iterable[Collective]
) -> dict[str, list[Window]]:
    """Return where collectives start and are waited for, by computation."""
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
    """Return totals for each kind of collective over each product of mesh axes."""
    groups: dict[tuple[tuple[str, ...] | None, str], list[Collective]] = {}
    for row in rows:
        groups.setdefault((row.along, row.kind), []).append(row)
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

    def lane(self, cluster: Cluster) -> tuple[object, ...]:
        """Return what collectives that run in sequence have in common.

        The mesh axes, or the part of one; on a torus, whose links lead to one neighbour
        each, the pairs of devices too.
        """
        pairs = self.start.attribute(r"source_target_pairs=(\{\{.*?\}\})")
        return self.row.along, self.row.part, pairs if cluster.torus else None


def _starts(program: Program) -> Iterator[tuple[int, tuple[Computation, Instruction]]]:
    """Yield the line of each collective, and the instruction that starts it."""
    callers = wrapping_instructions(program)
    for computation in program.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode.removesuffix("-start") in KINDS:
                itself = (computation, instruction)
                yield instruction.line, callers.get(computation.name, itself)


def _sent(computation: Computation, start: Instruction) -> Instruction:
    """Return the instruction that has the operands: of a prepared start, its update."""
    if start.opcode != "custom-call-start" or start.operands:
        return start
    for user in computation.instructions:
        if start.name in user.operands and user.opcode == "custom-call-update":
            return user
    return start


def _done(computation: Computation, start: Instruction) -> int | None:
    """Return where it is waited for; None if it is not asynchronous."""
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
            if (work := matmuls.work(computation, each)).flops
        }
        overlap = Overlap(
            line=window.row.line,
            matmul_flops=sum(work.flops for work in works.values()),
            matmul_bytes=sum(work.num_bytes for work in works.values()),
        )
        if cluster is not None:
            wire_s = collective_wire_s(window.row, mesh_shape, cluster)
            hidden_s = lanes[window.lane(cluster)].hide(works, wire_s)
            overlap = replace(overlap, wire_s=wire_s, hidden_s=hidden_s)
        yield overlap


@dataclass
class _Lane:
    """Matmul seconds already taken by collectives that run one after another."""

    taken: dict[str, float] = field(default_factory=dict)

    def hide(self, works: Mapping[str, Work], seconds: float) -> float:
        """Take up to `seconds` of the matmuls, earliest first; return what it got."""
        hidden = 0.0
        for name, work in works.items():
            left = work.seconds - self.taken.get(name, 0.0)
            here = min(left, seconds - hidden)
            self.taken[name] = self.taken.get(name, 0.0) + here
            hidden += here
        return hidden


def collective_wire_s(
    row: Collective, mesh_shape: Mapping[str, int], cluster: Cluster
) -> float:
    """Return the seconds of one execution; groups of no product count all devices."""
    mesh_axes = tuple(mesh_shape) if row.mesh_axes is None else row.mesh_axes
    if row.part is not None:
        axis, stride = row.part
        mesh_axes = (axis,)
        mesh_shape = cut_mesh_axis(mesh_shape, axis, stride, row.group_size)
    link = cluster.mesh_link(mesh_shape, mesh_axes)
    # A program says itself where it all-reduces instead.
    link = replace(link, scatters_whole=False)
    members = math.prod(mesh_shape[axis] for axis in mesh_axes)
    return collective_s(row.kind, row.payload_bytes, members, link)


COMPUTE = "matmuls"
"""Row of the matmuls."""

_BACKWARD = "transpose("


@dataclass(frozen=True, kw_only=True)
class Span:
    """A piece of work of one row.

    Args:
        row: `matmuls`, or the mesh axes of a collective.
        name: Kind of the collective, or path of the matmul.
        start_s: From the block's beginning.
        end_s: From there too.
        is_exposed: Whether compute waits for it meanwhile.
    """

    row: str
    name: str
    start_s: float
    end_s: float
    is_exposed: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockTimeline:
    """One execution of a loop's body.

    Args:
        name: `forward` or `backward`.
        executions: Of it, in one run of the program.
        spans: In the order in which they start.
        span_s: Seconds that it takes.
    """

    name: str
    executions: int
    spans: tuple[Span, ...]
    span_s: float


def block_timelines(
    program: Program,
    rows: Iterable[Collective],
    mesh_shape: Mapping[str, int],
    cluster: Cluster,
) -> tuple[BlockTimeline, ...]:
    """Return a block's forward and backward: the loop bodies that take longest.

    Args:
        program: The scheduled program.
        rows: Its collectives.
        mesh_shape: Size of each mesh axis, outermost first.
        cluster: The machine.
    """
    matmuls, windows = (
        Matmuls(program, cluster.device),
        collective_windows(program, rows),
    )
    longest: dict[str, BlockTimeline] = {}
    for name, at in places(program).items():
        if not any(place.in_loop and not place.fused for place in at):
            continue
        computation = program.computations[name]
        clock = _Clock(mesh_shape, cluster)
        spans = tuple(_spans(computation, windows.get(name, []), matmuls, clock))
        paths = [each.op_path for each in computation.instructions if each.op_path]
        backward = sum(_BACKWARD in path for path in paths)
        found = BlockTimeline(
            name="backward" if 2 * backward > len(paths) else "forward",
            executions=sum(place.executions for place in at),
            spans=tuple(sorted(spans, key=lambda span: span.start_s)),
            span_s=max((span.end_s for span in spans), default=0.0),
        )
        before = longest.get(found.name)
        if spans and (before is None or _total_s(found) > _total_s(before)):
            longest[found.name] = found
    return tuple(longest[name] for name in ("forward", "backward") if name in longest)


def _total_s(one: BlockTimeline) -> float:
    return one.executions * one.span_s


@dataclass
class _Clock:
    """Until when compute and each row of collectives are busy."""

    mesh_shape: Mapping[str, int]
    cluster: Cluster
    now_s: float = 0.0
    free_s: dict[str, float] = field(default_factory=dict)

    def send(self, window: Window) -> tuple[float, float]:
        """Start a collective after those of its row; return its start and end."""
        row = axes_text(window.row.along)
        start_s = max(self.now_s, self.free_s.get(row, 0.0))
        end_s = start_s + collective_wire_s(window.row, self.mesh_shape, self.cluster)
        self.free_s[row] = end_s
        return start_s, end_s


def _spans(
    computation: Computation,
    windows: Iterable[Window],
    matmuls: Matmuls,
    clock: _Clock,
) -> Iterator[Span]:
    first: dict[int, list[Window]] = {}
    last: dict[int, list[Window]] = {}
    for window in windows:
        first.setdefault(window.first, []).append(window)
        last.setdefault(window.last, []).append(window)
    under_way: dict[int, tuple[float, float]] = {}
    collectives = {window.start.name for window in windows}
    for at, instruction in enumerate(computation.instructions):
        for window in first.get(at, []):
            under_way[window.row.line] = clock.send(window)
        for window in last.get(at, []):
            yield from _waited_for(window, under_way.pop(window.row.line), clock)
        seconds = matmuls.work(computation, instruction).seconds
        if seconds and instruction.name not in collectives:
            start_s, clock.now_s = clock.now_s, clock.now_s + seconds
            name = instruction.op_path.split("/")[-2:]
            yield Span(
                row=COMPUTE, name="/".join(name), start_s=start_s, end_s=clock.now_s
            )


def _waited_for(
    window: Window, sent: tuple[float, float], clock: _Clock
) -> Iterator[Span]:
    """Yield the hidden part of a collective, then the exposed one."""
    (start_s, end_s), kind = sent, window.row.kind
    row = axes_text(window.row.along)
    waits_from = min(max(clock.now_s, start_s), end_s)
    if waits_from > start_s:
        yield Span(row=row, name=kind, start_s=start_s, end_s=waits_from)
    if end_s > waits_from:
        yield Span(row=row, name=kind, start_s=waits_from, end_s=end_s, is_exposed=True)
    clock.now_s = max(clock.now_s, end_s)
