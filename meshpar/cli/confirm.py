"""Plans compiled for their machine, which need not be there: predicted, and found."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from meshpar.audit.report import audit
from meshpar.audit.target import Target
from meshpar.audit.targets import TargetError
from meshpar.cli.audit import adamw_step
from meshpar.cli.estimate import train_model
from meshpar.cli.parsing import MODEL_FROM, model_of
from meshpar.errors import InputError
from meshpar.hardware.devices import DEVICES, TARGET_NAMES
from meshpar.machine.mesh import absent_mesh
from meshpar.model.contract import Model
from meshpar.model.tracing import traced_batch
from meshpar.planner.cost.estimate import Estimate, estimate_run
from meshpar.planner.machine.cluster import Cluster
from meshpar.train.layout_refusals import layout_errors


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """One plan, as predicted and as compiled.

    Args:
        layout, target: What was compiled for what.
        problem: Why it was not; empty if it was.
        predicted_bytes, compiled_bytes: Memory of a device.
        collectives: Mesh axes -> bytes that a device sends, predicted and compiled.
        compile_s: Seconds that it took.
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
        """One entry of what `meshpar plan --json` prints."""
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
        """What, predicted, compiled, and how far apart."""
        if self.problem:
            return [("problem", self.problem, "", "")]
        by_size = sorted(self.collectives.items(), key=lambda item: -max(item[1]))
        pairs = {"memory": (self.predicted_bytes, self.compiled_bytes)}
        pairs |= {f"sent over {'+'.join(axes)}": of for axes, of in by_size}
        return [
            (name, f"{predicted:,.0f}", f"{compiled:,.0f}", _apart(predicted, compiled))
            for name, (predicted, compiled) in pairs.items()
        ]

    def lines(self) -> list[str]:
        """The same as text."""
        head = f"{self.layout} compiled for {self.target} in {self.compile_s:.0f} s"
        if self.problem:
            return [f"{self.layout} for {self.target}: {self.problem}"]
        lines = [head, f"  {'bytes of a device':<28}{'predicted':>20}{'compiled':>20}"]
        return lines + [
            f"  {name:<28}{predicted:>20}{compiled:>20}  {apart}"
            for name, predicted, compiled, apart in self.rows()
        ]


def confirm(args: argparse.Namespace, plans: Sequence[Estimate]) -> list[Confirmed]:
    """Compiles each plan; one that cannot be says why.

    Raises:
        InputError: The machine is none that can be compiled for, or there is no such
            model to compile.
    """
    target = target_of(plans[0].run.cluster)
    jax.config.update("jax_platforms", "cpu")  # This process only traces.
    model = chosen_model(args)
    return [compiled(model, target, plan) for plan in plans]


def target_of(cluster: Cluster) -> Target:
    """What `meshpar audit --target` calls the cluster.

    Raises:
        InputError: It is none that can be compiled for.
    """
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


def chosen_model(args: argparse.Namespace) -> Model:
    """The model itself, of the options that gave the planner its sizes.

    Raises:
        InputError: The planner knows its sizes, but there is no such model to build.
    """
    if args.vocab is not None and (args.model or "").endswith(".json"):
        raise InputError(
            f"--vocab {args.vocab} changes the planner's sizes, not the model of "
            f"{args.model}; change vocab_size in the file",
            key="command.vocab_of_config_file",
        )
    preset, sizes = train_model(args)
    chosen = argparse.Namespace(preset=preset, model=sizes, model_from=MODEL_FROM)
    return model_of(chosen)


def compiled(model: Model, target: Target, plan: Estimate) -> Confirmed:
    """One plan compiled for its machine.

    Where there is no GPU, tracing finds no cuDNN, and XLA's own attention is compiled:
    that is then what is predicted too, so that the two are of one program.
    """
    layout, run = plan.run.layout, plan.run
    if target.platform == "gpu":
        unfused = replace(run.execution, fused_attention=False)
        plan = estimate_run(replace(run, execution=unfused))
    names: dict[str, Any] = {"layout": str(layout), "target": str(target)}
    for error in layout_errors(layout).values():
        return Confirmed(**names, problem=str(error))
    step = adamw_step(model, layout, mesh=absent_mesh(layout))
    batch = traced_batch(step.model, run.global_batch, run.seq)
    try:
        report = audit(step, batch, target=target)
    except TargetError as error:
        return Confirmed(**names, problem=str(error))
    if report.memory is None:
        return Confirmed(**names, problem=report.problem)
    sent: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for collective in plan.collectives:
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


def _apart(predicted: float, compiled: float) -> str:
    return f"{predicted / compiled - 1:+.1%}" if compiled else "not compiled"
