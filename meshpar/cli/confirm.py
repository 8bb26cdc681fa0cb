"""Plans compiled for a machine, present or not: predicted and compiled bytes."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from meshpar.audit.report import AuditReport, audit
from meshpar.audit.target import Target
from meshpar.audit.targets import TargetError
from meshpar.cli.audit import adamw_step
from meshpar.cli.options import planned_model
from meshpar.errors import InputError
from meshpar.hardware.devices import DEVICES, TARGET_NAMES
from meshpar.layout import Layout
from meshpar.layout.requirements import layout_errors
from meshpar.machine.mesh import absent_mesh
from meshpar.model.contract import Model
from meshpar.model.tracing import traced_batch
from meshpar.planner.cost.estimate import Estimate, estimate_run
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.mixed import check_one_kind
from meshpar.planner.published.compiled import as_compiled


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """Predicted and compiled memory and traffic of one plan.

    Args:
        layout, target: The layout, and the devices it was compiled for.
        problem: Why it was not compiled; empty if it was.
        predicted_bytes, compiled_bytes: Memory of a device.
        collectives: Mesh axes -> bytes that a device sends, predicted and compiled.
        compile_s: Seconds of compilation.
    """

    layout: str
    target: str
    problem: str = ""
    predicted_bytes: float = 0.0
    compiled_bytes: float = 0.0
    collectives: dict[tuple[str, ...], tuple[float, float]] = field(
        default_factory=dict
    )
    compile_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return an entry of `confirmed` in `meshpar plan --json`."""
        return {
            "layout": self.layout,
            "target": self.target,
            "problem": self.problem,
            "predicted_bytes": round(self.predicted_bytes),
            "compiled_bytes": round(self.compiled_bytes),
            "collectives": [
                {
                    "mesh_axes": list(axes),
                    "predicted_bytes": round(predicted),
                    "compiled_bytes": round(compiled),
                }
                for axes, (predicted, compiled) in self.collectives.items()
            ],
            "compile_s": self.compile_s,
        }

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return rows of quantity, predicted, compiled and difference."""
        if self.problem:
            return [("problem", self.problem, "", "")]
        by_size = sorted(self.collectives.items(), key=lambda item: -max(item[1]))
        pairs = {"memory": (self.predicted_bytes, self.compiled_bytes)}
        pairs |= {f"sent over {'+'.join(axes)}": pair for axes, pair in by_size}
        rows = []
        for name, (predicted, compiled) in pairs.items():
            error = f"{predicted / compiled - 1:+.1%}" if compiled else "not compiled"
            rows.append((name, f"{predicted:,.0f}", f"{compiled:,.0f}", error))
        return rows

    def lines(self) -> list[str]:
        """Return the same as lines of text."""
        head = f"{self.layout} compiled for {self.target} in {self.compile_s:.0f} s"
        if self.problem:
            return [f"{self.layout} for {self.target}: {self.problem}"]
        lines = [head, f"  {'bytes of a device':<28}{'predicted':>20}{'compiled':>20}"]
        return lines + [
            f"  {name:<28}{predicted:>20}{compiled:>20}  {error}"
            for name, predicted, compiled, error in self.rows()
        ]


def confirm(args: argparse.Namespace, plans: Sequence[Estimate]) -> list[Confirmed]:
    """Compile each plan; a plan that fails says why.

    Raises:
        InputError: No compiler knows the machine, or there is no such model to build.
    """
    target = cluster_target(plans[0].run.cluster)
    jax.config.update("jax_platforms", "cpu")  # This process only traces.
    model = planned_model(args)
    return [compiled(model, target, plan) for plan in plans]


def cluster_target(cluster: Cluster) -> Target:
    """Return the target of `meshpar audit --target` for a cluster.

    Raises:
        InputError: No compiler knows it.
    """
    check_one_kind(cluster, "--confirm compiles for")
    name = TARGET_NAMES.get(cluster.device.name)
    if name is None or (cluster.torus and cluster.hosts > 1):
        gpus = [name for name in TARGET_NAMES if not DEVICES[name].torus_dims]
        raise InputError(
            f"--confirm cannot compile for {cluster.text}; leave it out, or plan for "
            f"one slice of a TPU or for {', '.join(gpus)}",
            key="hardware.no_target",
        )
    sizes = cluster.torus or (cluster.hosts, cluster.devices_per_host)
    return Target.parse(f"{name}:{'x'.join(map(str, sizes))}")


def compiled(model: Model, target: Target, plan: Estimate) -> Confirmed:
    """Compile one plan for its machine.

    Without a GPU, tracing finds no cuDNN and XLA's own attention is compiled; the
    prediction then assumes that attention too.
    """
    layout, run = plan.run.layout, plan.run
    execution = as_compiled(run.execution, target.platform)
    if execution != run.execution:
        plan = estimate_run(replace(run, execution=execution))
    names: dict[str, Any] = {"layout": str(layout), "target": str(target)}
    try:
        report = compiled_report(model, layout, target, run.global_batch, run.seq)
    except (InputError, TargetError) as error:
        return Confirmed(**names, problem=str(error))
    if report.memory is None:
        return Confirmed(**names, problem=report.problem)
    sent: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for collective in plan.collectives or ():
        sent[collective.mesh_axes][0] += collective.wire_bytes
    for row in report.rows:
        found = row.collective
        sent[found.mesh_axes or ("?",)][1] += found.wire_bytes * found.executions
    return Confirmed(
        **names,
        predicted_bytes=plan.memory.total_bytes,
        compiled_bytes=report.memory.peak_bytes,
        collectives={axes: (one, two) for axes, (one, two) in sent.items()},
        compile_s=report.compile_s,
    )


def compiled_report(
    model: Model, layout: Layout, target: Target, global_batch: int, seq: int
) -> AuditReport:
    """Return the report of a step with AdamW, compiled for a machine.

    Raises:
        InputError: No step has the layout.
        TargetError: The compiler failed.
    """
    for error in layout_errors(layout).values():
        raise error
    step = adamw_step(model, layout, mesh=absent_mesh(layout))
    return audit(step, traced_batch(step.model, global_batch, seq), target=target)
