"""How attention crosses `context` in plans: the method that waits least.

Ring and gather make scores in tiles of our own, as they merge softmaxes; after Ulysses'
all-to-alls a device has whole sequences, which a fused kernel takes where there is one,
but its heads must divide. Where `context` is larger than a host, both degrees are tried
too: all-to-alls inside hosts, and a ring across. What each takes follows from the rows
of its traffic and the time of its attention; no other part of a step differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshpar.layout import Layout
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.seconds import (
    attention_backward_s,
    attention_forward_s,
    row_s,
)
from meshpar.planner.cost.traffic import context_rows
from meshpar.planner.search.space import Constraints
from meshpar.planner.workload.problems import layout_problems

METHODS = ("ring", "allgather", "ulysses")


def with_method(mesh: Layout, like: Run, constraints: Constraints) -> Layout:
    """The mesh with the method that takes least time; as it is where one is kept."""
    if mesh.context == 1 or "attention" in constraints.kept:
        return mesh
    taken = dict(_seconds(mesh, like))
    return replace(mesh, attention=min(taken, key=taken.__getitem__, default="ring"))


def why_method(layout: Layout, like: Run) -> str:
    """One line that holds the methods of a layout against each other.

    Empty where nothing crosses `context`.
    """
    if layout.context == 1:
        return ""
    taken = dict(_seconds(layout, like))
    words = ", ".join(f"{name} {taken[name] * 1e3:.2f} ms" for name in taken)
    left = [name for name in _methods(layout, like) if name not in taken]
    if left:
        words += f"; {' and '.join(left)}: the heads do not divide"
    return (
        f"attention={layout.attention} over context={layout.context}: attention and "
        f"what it waits for, a block and step: {words}"
    )


def _seconds(mesh: Layout, like: Run) -> Iterator[tuple[str, float]]:
    """Method -> what a block's attention and its exchange take, where it can be."""
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
        if not any(problem.key == "attention" for problem in problems):
            yield method, _block_s(replace(like, layout=layout))


def _methods(mesh: Layout, like: Run) -> tuple[str, ...]:
    """Those that a mesh may take: both degrees where hosts cut `context` evenly."""
    here, context = like.cluster.link(mesh, "context").inner, mesh.context
    if here in (1, context) or context % here:
        return METHODS
    return (*METHODS, f"ulysses:{here}+ring:{context // here}")


def _block_s(run: Run) -> float:
    work_s = attention_forward_s(run), attention_backward_s(run)
    total = sum(work_s)
    for passes, own_s in zip(("forward", "backward"), work_s, strict=True):
        rows = [row for row in context_rows(run) if row.passes == passes]
        total += sum(row_s(run, row) for row in rows if not row.hidden_by)
        beside_s = sum(row_s(run, row) for row in rows if row.hidden_by)
        total += max(0.0, beside_s - own_s)
    return total
