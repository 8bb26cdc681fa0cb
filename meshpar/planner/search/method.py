"""Method: how attention crosses `context`, the fastest for a mesh shape.

Ring and gather make scores in tiles of our own, as they merge softmaxes. After Ulysses'
all-to-alls a device has whole sequences, which a fused kernel takes if there is one,
but its heads must divide. Where `context` is larger than a host, both degrees are tried
too: all-to-alls inside hosts, and a ring across. Only the traffic and the attention of
a step differ between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshpar.layout import Layout
from meshpar.layout.context_method import CONTEXT_METHODS, ContextAttention
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.seconds import (
    ATTENTION,
    attention_backward_s,
    attention_forward_s,
    exposed,
    rows_in,
)
from meshpar.planner.cost.traffic import context_rows
from meshpar.planner.search.space import Constraints
from meshpar.planner.workload.problems import layout_problems

_PLAIN = Layout()


def with_method(mesh: Layout, like: Run, constraints: Constraints) -> Layout:
    """Return the mesh with the attention method that takes least time, or the kept."""
    if mesh.context == 1 or "attention" in constraints.kept:
        return mesh
    # On a torus, and between kinds of devices, links depend on every mesh axis.
    varied = like.cluster.torus or like.cluster.parts
    outside = (*mesh.mesh_shape.values(),) if varied else ()
    inside = mesh.batch_shards, mesh.stage > 1, mesh.context, mesh.expert, mesh.tensor
    key = "method", outside, inside, like.cluster.link(mesh, "context")
    if key not in like.known:
        seconds = dict(_method_seconds(mesh, like))
        fastest = min(seconds, key=seconds.__getitem__, default=_PLAIN.attention)
        like.known[key] = fastest
    return replace(mesh, attention=like.known[key])


def why_method(layout: Layout, like: Run) -> str:
    """Return a line with the time of each method; empty without `context`."""
    if layout.context == 1:
        return ""
    seconds = dict(_method_seconds(layout, like))
    words = ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in seconds.items())
    left = [name for name in _methods(layout, like) if name not in seconds]
    if left:
        words += f"; {' and '.join(left)}: the heads do not divide"
    return (
        f"attention={layout.attention} over context={layout.context}: attention and "
        f"what it waits for, a block and step: {words}"
    )


def _method_seconds(mesh: Layout, like: Run) -> Iterator[tuple[str, float]]:
    """Yield each possible method and the time of a block's attention and exchange."""
    sizes: dict[str, Any] = dict(mesh.mesh_shape)
    for method in _methods(mesh, like):
        layout = Layout(**sizes, attention=method, precision=mesh.precision)
        problems = layout_problems(
            like.workload,
            layout,
            global_batch=like.global_batch,
            seq=like.seq,
            execution=like.execution,
        )
        if not any(problem.option == "attention" for problem in problems):
            yield method, _block_s(replace(like, layout=layout))


def _methods(mesh: Layout, like: Run) -> tuple[str, ...]:
    """Return all methods, and both degrees if hosts cut `context` evenly."""
    inner, context = like.cluster.link(mesh, "context").inner, mesh.context
    if inner in (1, context) or context % inner:
        return tuple(CONTEXT_METHODS)
    both = ContextAttention(heads=inner, groups=context // inner)
    return (*CONTEXT_METHODS, both.text)


def _block_s(run: Run) -> float:
    work_s = attention_forward_s(run), attention_backward_s(run)
    rows, total_s = context_rows(run), sum(work_s)
    for passes, own_s in zip(("forward", "backward"), work_s, strict=True):
        waits = exposed(run, rows_in(rows, passes), {ATTENTION: own_s})
        total_s += waits.total_s
    return total_s
