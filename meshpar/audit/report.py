"""`audit`: every collective, byte and FLOP of a compiled program, with reasons."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from meshpar.audit.collectives import Collective, collectives_of
from meshpar.audit.evidence import Evidence
from meshpar.audit.flops import flops_of
from meshpar.audit.hazards import compiled_hazards, traced_hazards
from meshpar.audit.hlo import parse_program
from meshpar.audit.memory import MemoryUse, largest_buffers
from meshpar.audit.overlap import cluster_of_target, overlaps_of
from meshpar.audit.program_report import AuditReport
from meshpar.audit.reasons import Explained, explain
from meshpar.audit.subject import Subject, subject_of
from meshpar.audit.target import Target
from meshpar.audit.targets import CompiledProgram, TargetError, compile_for
from meshpar.audit.timeline import BlockTimeline, timelines_of
from meshpar.audit.traced import fallbacks, operations
from meshpar.errors import InputError
from meshpar.layout import MESH_AXES
from meshpar.mesh import slow_axes_of
from meshpar.mesh_order import SlowAxis, slow_axes
from meshpar.planner.machine.cluster import Cluster
from meshpar.topology import Topology


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
    """Compiles a function and reports what the compiler made of it. Runs nothing.

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
    chosen = None if target is None else Target.of(target)
    platform = None if chosen is None else chosen.platform
    subject = subject_of(function, arguments, mesh=mesh, platform=platform)
    subject = _with_options(subject, compiler_options)
    start = time.perf_counter()
    flat = subject.flat()
    traced = operations(flat.jaxpr, flat.in_shardings, flat.weights)
    hazards = tuple(traced_hazards(traced, subject.platform))
    fatal = any(hazard.fatal for hazard in hazards)
    known = AuditReport(
        layout=str(subject.layout or ""),
        target=str(chosen or subject.platform),
        mesh_shape=subject.mesh_shape,
        notes=subject.notes + fallbacks(traced),
        compiler_options=subject.compiler_options,
        capacity_bytes=None if chosen is None else chosen.memory_bytes,
        hazards=hazards,
    )
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
        evidence=Evidence.of(traced, subject.mesh_shape),
        expected=expected,
    )
    cluster = cluster_of_target(chosen)
    return _read(known, compiled, explained, subject.mesh, cluster)


def _with_options(subject: Subject, given: Mapping[str, Any] | None) -> Subject:
    options = {**subject.compiler_options, **(given or {})}
    options = {name: value for name, value in options.items() if value is not None}
    return replace(subject, compiler_options=options)


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
        return _compiled_here(subject)
    return compile_for(
        target or _as_virtual(subject),
        subject,
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
    )


def _as_virtual(subject: Subject) -> Target:
    if subject.platform != "cpu":
        raise TargetError(
            f"not compiled, because the compiler for {subject.platform} might abort "
            "this process",
            key="audit.compiler_might_abort",
        )
    return Target(platform="cpu", chip="virtual", shape=(subject.mesh.size,))


def _compiled_here(subject: Subject) -> CompiledProgram:
    compiled = subject.lower().compile(dict(subject.compiler_options) or None)
    memory = MemoryUse.of(compiled, subject.platform)
    return CompiledProgram(text=compiled.as_text() or "", memory=memory)


def _read(
    known: AuditReport,
    compiled: CompiledProgram,
    explained: Callable[[Collective], Explained],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    cluster: Cluster | None,
) -> AuditReport:
    program = parse_program(compiled.text)
    mesh_shape, flops = known.mesh_shape, flops_of(program)
    rows = collectives_of(program, mesh_shape)
    timelines: tuple[BlockTimeline, ...] = ()
    if cluster is not None:
        timelines = timelines_of(program, rows, mesh_shape, cluster)
    return replace(
        known,
        rows=tuple(map(explained, rows)),
        memory=compiled.memory,
        flops=flops.total,
        uncounted=flops.uncounted,
        overlaps=overlaps_of(program, rows, mesh_shape, cluster),
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
    """Of a mesh of our own six axes: those that lie on a slower link than they could.

    Compared by what each sends; what matmuls hide of it counts too.
    """
    if tuple(mesh.axis_names) != MESH_AXES:
        return ()
    sent: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        sent[row.mesh_axes or ()] += row.wire_bytes * row.executions
    if cluster is None:
        return slow_axes_of(mesh, sent) if isinstance(mesh, jax.sharding.Mesh) else ()
    if cluster.torus:
        return ()  # One slice has no slower link.
    topology = Topology(
        hosts=cluster.hosts,
        devices_per_host=cluster.devices_per_host,
        host_bytes_per_s=cluster.device.link_bytes_per_s,
        network_bytes_per_s=cluster.device.network_bytes_per_s,
    )
    return slow_axes(topology, dict(mesh.shape), sent)
