"""`audit`: every collective, byte and FLOP of a compiled program, with reasons."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import jax

from meshpar.audit.collectives import Collective, axes_text, find_collectives
from meshpar.audit.evidence import Evidence
from meshpar.audit.flops import Matmuls, UncountedCall, program_flops
from meshpar.audit.hazards import Hazard, compiled_hazards, traced_hazards
from meshpar.audit.hlo import parse_program
from meshpar.audit.memory import Buffer, MemoryUse, largest_buffers
from meshpar.audit.overlap import (
    BlockTimeline,
    Overlap,
    OverlapTotal,
    block_timelines,
    find_overlaps,
    overlap_totals,
    target_cluster,
)
from meshpar.audit.reasons import Explained, explain
from meshpar.audit.subject import Subject, make_subject
from meshpar.audit.tables import report_html
from meshpar.audit.target import Target
from meshpar.audit.targets import CompiledProgram, TargetError, compile_for
from meshpar.errors import InputError
from meshpar.hardware.attention_kernels import obstacle_words
from meshpar.hardware.platforms import platform_named
from meshpar.layout import MESH_AXES
from meshpar.machine.mesh import (
    Groups,
    SlowAxis,
    Speeds,
    slow_axes,
    slow_mesh_axes,
    slower_axes,
)
from meshpar.machine.topology import Topology
from meshpar.planner.machine.cluster import Cluster
from meshpar.trace.operations import Operation, operations


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """Collectives, memory and FLOPs of a program, per device and run.

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
        matmul_s: Seconds of all matmuls; None if no table has the device.
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
    matmul_s: float | None = None
    overlaps: Mapping[int, Overlap] = field(default_factory=dict)
    timelines: tuple[BlockTimeline, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    problem: str = ""
    too_large: bool = False
    notes: tuple[str, ...] = ()
    slow_axes: tuple[SlowAxis, ...] = ()
    compile_s: float = 0.0

    def _repr_html_(self) -> str:
        return report_html(self)

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
        """True if the peak is within a device's memory; None if either is unknown."""
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
        """Return a line for every hazard and every collective that nobody asked for.

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
        """Return counts and bytes sent per device, by (mesh axes, kind)."""
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
        """Totals of hidden communication, by kind of collective and mesh axes."""
        return overlap_totals((row.collective for row in self.rows), self.overlaps)

    @property
    def exposed_share(self) -> float | None:
        """Share of the step, 0 to 1, that waits for communication; None if unknown.

            share = exposed / (exposed + matmuls)

        in seconds per device. Work that is no matmul neither counts nor hides.
        """
        exposed = [total.exposed_s for total in self.overlap()]
        if self.matmul_s is None or None in exposed:
            return None
        exposed_s = sum(filter(None, exposed))
        total_s = exposed_s + self.matmul_s
        return exposed_s / total_s if total_s else 0.0

    def _check_compiled(self) -> None:
        if self.problem:
            raise TargetError(
                self.problem,
                key="audit.does_not_fit" if self.too_large else "audit.not_compiled",
            )

    def to_json(self) -> dict[str, Any]:
        """Return the object that `meshpar audit --json` prints."""
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
            "matmul_s": self.matmul_s,
            "exposed_share": self.exposed_share,
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


def audit(
    function: Any,
    *arguments: Any,
    target: str | Target | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    expected: Mapping[str, Mapping[str, str]] | None = None,
    timeout_s: float = 600.0,
    memory_bytes: int = 16 << 30,
    compiler_options: Mapping[str, Any] | None = None,
) -> AuditReport:
    """Compile a function and report what the compiler made of it. Runs nothing.

    Args:
        function: A step of `make_train_step`, or any function, jitted or not.
        arguments: Arrays or `jax.ShapeDtypeStruct`s; of a step, a batch.
        target: Hardware that is not there, such as `tpu:v5p:4x4x4` or `gpu:h100:8x8`
            (hosts x GPUs); the devices of the mesh when absent. Needs the extra `aot`.
        mesh: Names the collectives; found from the arguments when absent.
        expected: Mesh axis -> kind -> reason, of what the caller asks for besides.
        timeout_s: Seconds that compiling for an absent target may take.
        memory_bytes: Memory that it may take.
        compiler_options: XLA's, over those that a step has: of its platform, and on its
            own devices those that it was made with (`make_train_step`). None as a value
            leaves one out.

    Returns:
        The report. A program that XLA may abort on is compiled in another process; if
        that dies, the report has its hazards and the compiler's words as `problem`.

    Raises:
        InputError: No mesh is found, the target is unknown or of another size.
        TargetError: The compiler for an absent target failed; its words are in the
            message.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> from meshpar import Layout, make_mesh
        >>> mesh = make_mesh(Layout(tensor=-1))
        >>> x = jax.ShapeDtypeStruct(
        ...     (8, 16), jnp.float32,
        ...     sharding=NamedSharding(mesh, PartitionSpec(None, "tensor")))
        >>> report = audit(lambda x: x.sum(axis=1), x)
        >>> [(row.collective.kind, row.reason) for row in report.rows]
        [('all-reduce', 'partial sums of reduce_sum')]
    """
    chosen = None if target is None else Target.parse(target)
    subject = make_subject(
        function,
        arguments,
        mesh=mesh,
        platform=None if chosen is None else chosen.platform,
        devices_per_host=None if chosen is None else chosen.devices_per_host,
    )
    subject = subject.with_options(compiler_options)
    start = time.perf_counter()
    flat = subject.flat()
    traced = operations(flat.jaxpr, flat.in_shardings, flat.weights)
    known = _traced_report(subject, chosen, traced)
    fatal = any(hazard.fatal for hazard in known.hazards)
    try:
        compiled = _compile(
            subject,
            chosen,
            fatal=fatal,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
        )
    except TargetError as error:
        if not fatal or error.key == "audit.missing_package":
            raise
        return replace(known, problem=str(error))
    known = replace(known, compile_s=time.perf_counter() - start)
    if compiled.problem:
        return replace(known, problem=compiled.problem, too_large=True)
    explained = functools.partial(
        explain,
        subject=subject,
        evidence=Evidence.from_trace(traced, subject.mesh_shape),
        expected=expected,
    )
    cluster = target_cluster(chosen)
    return _read(known, compiled, explained, subject.mesh, cluster)


def _traced_report(
    subject: Subject, target: Target | None, traced: Sequence[Operation]
) -> AuditReport:
    """Return the part of a report that is known before anything compiles.

    Its notes say which attention runs in another form than it might.
    """
    paths = {str(operation.equation.source_info.name_stack) for operation in traced}
    fallbacks = {words for path in paths if (words := obstacle_words(path))}
    return AuditReport(
        layout=str(subject.layout or ""),
        target=str(target or subject.platform),
        mesh_shape=subject.mesh_shape,
        notes=(*subject.notes, *sorted(fallbacks)),
        compiler_options=subject.compiler_options,
        capacity_bytes=None if target is None else target.memory_bytes,
        hazards=tuple(traced_hazards(traced, subject.platform)),
    )


def _compile(
    subject: Subject,
    target: Target | None,
    *,
    fatal: bool,
    timeout_s: float,
    memory_bytes: int,
) -> CompiledProgram:
    if target is None and isinstance(subject.mesh, jax.sharding.AbstractMesh):
        raise InputError(
            "the mesh has no devices to compile for; give target=, such as "
            f"'cpu:virtual:{subject.mesh.size}'",
            key="audit.missing_target",
        )
    if target is None and not fatal:
        with sources_in_cache_key():
            compiled = subject.lower().compile(dict(subject.compiler_options) or None)
        memory = MemoryUse.from_compiled(compiled, subject.platform)
        return CompiledProgram(text=compiled.as_text() or "", memory=memory)
    return compile_for(
        target or _as_virtual(subject),
        subject,
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
    )


def _as_virtual(subject: Subject) -> Target:
    if not platform_named(subject.platform).is_host:
        raise TargetError(
            f"not compiled, because the compiler for {subject.platform} might abort "
            "this process",
            key="audit.compiler_might_abort",
        )
    return Target(platform=subject.platform, chip="virtual", shape=(subject.mesh.size,))


@contextlib.contextmanager
def sources_in_cache_key() -> Iterator[None]:
    """Let JAX's persistent cache tell programs apart whose source lines differ.

    By default its key leaves out names and lines: a program that was compiled before
    somebody edited a file comes back with that file's old lines, which explain nothing.
    """
    option = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, before)


def _read(
    known: AuditReport,
    compiled: CompiledProgram,
    explained: Callable[[Collective], Explained],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    cluster: Cluster | None,
) -> AuditReport:
    program = parse_program(compiled.text)
    mesh_shape, flops = known.mesh_shape, program_flops(program)
    rows = find_collectives(program, mesh_shape)
    timelines: tuple[BlockTimeline, ...] = ()
    matmul_s = None
    if cluster is not None:
        timelines = block_timelines(program, rows, mesh_shape, cluster)
        matmul_s = Matmuls(program, cluster.device).all_work().seconds
    return replace(
        known,
        rows=tuple(map(explained, rows)),
        memory=compiled.memory,
        flops=flops.total,
        uncounted=flops.uncounted,
        matmul_s=matmul_s,
        overlaps=find_overlaps(program, rows, mesh_shape, cluster),
        timelines=timelines,
        buffers=largest_buffers(program),
        hazards=(*known.hazards, *compiled_hazards(rows)),
        slow_axes=_slow_axes(rows, mesh, cluster),
    )


def _slow_axes(
    rows: Sequence[Collective],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    cluster: Cluster | None,
) -> tuple[SlowAxis, ...]:
    """Return the axes of a layout's mesh that lie on a slower link than they could.

    Compared by what each sends; what matmuls hide of it counts too.
    """
    if tuple(mesh.axis_names) != MESH_AXES:
        return ()
    sent: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        sent[row.mesh_axes or ()] += row.wire_bytes * row.executions
    if cluster is None:
        return slow_mesh_axes(mesh, sent) if isinstance(mesh, jax.sharding.Mesh) else ()
    if cluster.torus:

        def on_torus(order: Sequence[str], groups: Groups) -> Speeds:
            shape = {axis: mesh.shape[axis] for axis in order}
            return {axes: cluster.mesh_link(shape, axes).bytes_per_s for axes in groups}

        return slower_axes(mesh.shape, sent, on_torus, place="along the torus")
    topology = Topology(
        hosts=cluster.hosts,
        devices_per_host=cluster.devices_per_host,
        host_bytes_per_s=cluster.device.link_bytes_per_s,
        network_bytes_per_s=cluster.device.network_bytes_per_s,
    )
    return slow_axes(topology, dict(mesh.shape), sent)
