"""One block's schedule over time: its matmuls, and the collectives beside them.

The scheduled program gives the order; the table of devices and links gives the seconds.
Compute waits where a collective is not done when its done is reached. What is no matmul
takes no time here, so that a collective may look exposed that an elementwise kernel
hides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from meshpar.audit.collectives import Collective, axes_text
from meshpar.audit.hlo import Computation, Program
from meshpar.audit.loops import Place, places
from meshpar.audit.overlap import Window, windows_of, wire_s_of
from meshpar.audit.work import Matmuls
from meshpar.planner.machine.cluster import Cluster

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


def timelines_of(
    program: Program,
    rows: Iterable[Collective],
    mesh_shape: Mapping[str, int],
    cluster: Cluster,
) -> tuple[BlockTimeline, ...]:
    """A block's forward and its backward: the loops' bodies that take longest in all.

    Args:
        program: The scheduled program.
        rows: Its collectives.
        mesh_shape: Size of each mesh axis, outermost first.
        cluster: The machine.
    """
    matmuls, windows = Matmuls(program, cluster.device), windows_of(program, rows)
    longest: dict[str, BlockTimeline] = {}
    for name, at in places(program).items():
        if not _is_body(at):
            continue
        computation = program.computations[name]
        clock = _Clock(mesh_shape, cluster)
        spans = tuple(_spans(computation, windows.get(name, []), matmuls, clock))
        found = BlockTimeline(
            name=_pass_of(computation),
            executions=sum(place.executions for place in at),
            spans=tuple(sorted(spans, key=lambda span: span.start_s)),
            span_s=max((span.end_s for span in spans), default=0.0),
        )
        before = longest.get(found.name)
        if spans and (before is None or _total_s(found) > _total_s(before)):
            longest[found.name] = found
    return tuple(longest[name] for name in ("forward", "backward") if name in longest)


def _is_body(at: list[Place]) -> bool:
    return any(place.in_loop and not place.fused for place in at)


def _total_s(one: BlockTimeline) -> float:
    return one.executions * one.span_s


def _pass_of(computation: Computation) -> str:
    """Of a loop over blocks by the paths of what is in it."""
    paths = [each.op_path for each in computation.instructions if each.op_path]
    backward = sum(_BACKWARD in path for path in paths)
    return "backward" if 2 * backward > len(paths) else "forward"


@dataclass
class _Clock:
    """Until when compute and each row of collectives are busy."""

    mesh_shape: Mapping[str, int]
    cluster: Cluster
    now_s: float = 0.0
    free_s: dict[str, float] = field(default_factory=dict)

    def send(self, window: Window) -> tuple[float, float]:
        """From when until when a collective is under way; one after another."""
        row = axes_text(window.row.mesh_axes)
        start_s = max(self.now_s, self.free_s.get(row, 0.0))
        end_s = start_s + wire_s_of(window.row, self.mesh_shape, self.cluster)
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
        seconds = matmuls.of(computation, instruction).seconds
        if seconds and instruction.name not in collectives:
            start_s, clock.now_s = clock.now_s, clock.now_s + seconds
            name = instruction.op_path.split("/")[-2:]
            yield Span(
                row=COMPUTE, name="/".join(name), start_s=start_s, end_s=clock.now_s
            )


def _waited_for(
    window: Window, sent: tuple[float, float], clock: _Clock
) -> Iterator[Span]:
    """The hidden part of a collective, and then the exposed one."""
    (start_s, end_s), kind = sent, window.row.kind
    row = axes_text(window.row.mesh_axes)
    waits_from = min(max(clock.now_s, start_s), end_s)
    if waits_from > start_s:
        yield Span(row=row, name=kind, start_s=start_s, end_s=waits_from)
    if end_s > waits_from:
        yield Span(row=row, name=kind, start_s=waits_from, end_s=end_s, is_exposed=True)
    clock.now_s = max(clock.now_s, end_s)
