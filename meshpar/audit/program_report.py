"""What a compiled program does, per device and run: what `audit` reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from meshpar.audit.collectives import axes_text
from meshpar.audit.flops import UncountedCall
from meshpar.audit.hazards import Hazard
from meshpar.audit.memory import Buffer, MemoryUse
from meshpar.audit.overlap import Overlap, OverlapTotal, overlap_totals
from meshpar.audit.reasons import Explained
from meshpar.audit.targets import TargetError
from meshpar.audit.timeline import BlockTimeline
from meshpar.mesh_order import SlowAxis


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What a program does, per device and run.

    Args:
        layout: The layout's line; empty if the program is no step of ours.
        target: What it was compiled for.
        mesh_shape: Size of each mesh axis.
        compiler_options: XLA's, that it was compiled with.
        rows: Every collective with its reason.
        memory: Bytes, or None if it did not compile.
        capacity_bytes: Memory of one device, if known.
        flops: Matmul FLOPs, with those that kernels estimate of themselves.
        uncounted: Custom calls whose FLOPs are not known, and not among them.
        overlaps: Line of each collective -> the matmuls beside it.
        timelines: Of a block's forward and backward, where the device has a table.
        buffers: The largest arrays written.
        hazards: What XLA is known to run wrongly or not at all.
        problem: Why there is no compiled program; empty if there is one.
        too_large: Whether the problem is that it does not fit.
        notes: What a step does otherwise than its layout may suggest, a line each.
        slow_axes: Mesh axes that another order puts on a faster link.
        compile_s: Seconds that lowering and compiling took.
    """

    layout: str
    target: str
    mesh_shape: dict[str, int]
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Explained, ...] = ()
    memory: MemoryUse | None = None
    capacity_bytes: int | None = None
    flops: int = 0
    uncounted: tuple[UncountedCall, ...] = ()
    overlaps: Mapping[int, Overlap] = field(default_factory=dict)
    timelines: tuple[BlockTimeline, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    problem: str = ""
    too_large: bool = False
    notes: tuple[str, ...] = ()
    slow_axes: tuple[SlowAxis, ...] = ()
    compile_s: float = 0.0

    @property
    def compiled_memory(self) -> MemoryUse:
        """Bytes of a program that compiled.

        Raises:
            TargetError: It did not.
        """
        self._check_compiled()
        assert self.memory is not None
        return self.memory

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within a device's memory; None if either is not known."""
        if self.too_large:
            return False
        if self.memory is None or self.capacity_bytes is None:
            return None
        return self.memory.peak_bytes <= self.capacity_bytes

    @property
    def surprises(self) -> tuple[Explained, ...]:
        """The collectives that nobody asked for.

        Raises:
            TargetError: The program did not compile, so that it has none to read.
        """
        self._check_compiled()
        return tuple(row for row in self.rows if row.surprise)

    def complaints(self) -> list[str]:
        """A line for every hazard, and for every collective that nobody asked for.

        One too for a program that did not compile, of which no collective is known.
        """
        lines = [
            f"hazard {hazard.kind}: {hazard.source}: {hazard.message}"
            for hazard in self.hazards
        ]
        if self.problem:
            return [
                *lines,
                f"not compiled, so its collectives are not known: {self.problem}",
            ]
        return lines + [
            f"surprise: {row.collective.kind} over "
            f"{axes_text(row.collective.mesh_axes)}, {row.collective.source}: "
            f"{row.reason}"
            for row in self.surprises
        ]

    def totals(self) -> dict[tuple[str, str], dict[str, int]]:
        """(mesh axes, kind) -> how many run, and the bytes each device sends."""
        totals: dict[tuple[str, str], dict[str, int]] = {}
        for row in self.rows:
            collective = row.collective
            total = totals.setdefault(
                (axes_text(collective.mesh_axes), collective.kind),
                {"executions": 0, "payload_bytes": 0, "wire_bytes": 0},
            )
            times = collective.executions
            total["executions"] += times
            total["payload_bytes"] += times * collective.payload_bytes
            total["wire_bytes"] += times * collective.wire_bytes
        return totals

    def overlap(self) -> tuple[OverlapTotal, ...]:
        """What matmuls hide, for each kind of collective over each mesh axes."""
        return overlap_totals((row.collective for row in self.rows), self.overlaps)

    def _check_compiled(self) -> None:
        if self.problem:
            raise TargetError(
                self.problem,
                key="audit.does_not_fit" if self.too_large else "audit.not_compiled",
            )

    def to_json(self) -> dict[str, Any]:
        """The object that `meshpar audit --json` prints."""
        names = [field.name for field in fields(MemoryUse)]
        memory = asdict(self.memory) if self.memory else dict.fromkeys(names)
        return {
            "layout": self.layout,
            "target": self.target,
            "mesh_shape": self.mesh_shape,
            "compiler_options": dict(self.compiler_options),
            "fits": self.fits,
            "problem": self.problem,
            "notes": list(self.notes),
            "slow_axes": [one.to_json() for one in self.slow_axes],
            "memory": {**memory, "capacity_bytes": self.capacity_bytes},
            "flops": self.flops,
            "uncounted": [asdict(call) for call in self.uncounted],
            "collectives": [_row_json(row, self.overlaps) for row in self.rows],
            "overlap": [_overlap_json(total) for total in self.overlap()],
            "totals": [
                {"mesh_axes": axes, "kind": kind, **total}
                for (axes, kind), total in self.totals().items()
            ],
            "buffers": [asdict(buffer) for buffer in self.buffers],
            "hazards": [asdict(hazard) for hazard in self.hazards],
            "compile_s": self.compile_s,
        }


def _overlap_json(total: OverlapTotal) -> dict[str, Any]:
    return {
        **asdict(total),
        "mesh_axes": list(total.mesh_axes or ()),
        "exposed_s": total.exposed_s,
        "hidden_share": total.hidden_share,
    }


def _row_json(row: Explained, overlaps: Mapping[int, Overlap]) -> dict[str, Any]:
    collective = row.collective
    beside = overlaps.get(collective.line, Overlap(line=collective.line))
    return {
        **asdict(collective),
        "matmul_flops": beside.matmul_flops,
        "matmul_bytes": beside.matmul_bytes,
        "wire_s": beside.wire_s,
        "hidden_s": beside.hidden_s,
        "mesh_axes": list(collective.mesh_axes or ()),
        "matches_mesh": collective.mesh_axes is not None,
        "reason": row.reason,
        "surprise": row.surprise,
    }
