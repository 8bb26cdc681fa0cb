"""Memory of steps that XLA compiled for absent machines, beside the planner's.

`compiled_memory.json` has the rows; `python -m recipes.bench.planner_memory` makes them
again. GPUs' programs have XLA's own attention, since tracing finds no cuDNN without a
GPU, and so has what is predicted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path

from meshpar.errors import key_values
from meshpar.hardware.devices import TARGET_NAMES
from meshpar.hardware.platforms import PLATFORMS
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import MESHPAR, Execution
from meshpar.planner.plan import Plan
from meshpar.planner.published.megatron import Measured
from meshpar.planner.search.space import Constraints
from meshpar.planner.volumes import VolumeRequest
from meshpar.planner.workload.shapes import TRACED, workload_of
from meshpar.planner.workload.volumes import VolumeWorkload
from meshpar.planner.workload.workload import Workload

SOURCE = "XLA"
FILE = Path(__file__).parents[1] / "compiled_memory.json"


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A training step in bf16 with AdamW, and its memory as compiled.

    Args:
        preset: Model by name; empty if `sizes` is all of it.
        sizes: Sizes that differ, as `meshpar plan --model` takes them.
        layout: Layout, without its precision.
        target: Machine, as `meshpar audit --target` takes it.
        global_batch: Sequences in a step.
        seq: Tokens of a sequence; 0 for volumes.
        held_out: True if the planner's formulas were written before it was compiled.
        compiled_bytes: Memory of a device; 0 before it is compiled.
        date: Day on which it was compiled.
    """

    preset: str = ""
    sizes: str = ""
    layout: str
    target: str
    global_batch: int
    seq: int = 0
    held_out: bool = False
    compiled_bytes: int = 0
    date: str = ""

    @property
    def name(self) -> str:
        """The model, the layout and the machine, in a line."""
        model = " ".join(filter(None, (self.preset, self.sizes)))
        batch = f"{self.global_batch}" + (f" x {self.seq}" if self.seq else "")
        note = ", held out" if self.held_out else ""
        return f"{model}, {self.layout}, {batch}, {self.target}{note}"

    @property
    def line(self) -> str:
        """The layout's line, with the precision of every step."""
        return f"{self.layout},precision=bf16"

    @property
    def _workload(self) -> Workload | VolumeWorkload:
        if not self.preset:
            return workload_of(self.sizes)
        if self.preset in TRACED:
            return _traced(self.preset, self.sizes, self.seq)
        return workload_of(self.preset, words=self.sizes or None)

    @property
    def plan(self) -> Plan:
        """The planner's estimate of the same step."""
        cluster, workload = _cluster(self.target), self._workload
        if isinstance(workload, VolumeWorkload):
            return VolumeRequest(
                workload=workload,
                cluster=cluster,
                global_batch=self.global_batch,
                constraints=Constraints.parse(keep=self.line.split(",")),
            ).kept_plan()[0]
        return estimate(
            workload,
            cluster,
            self.line,
            global_batch=self.global_batch,
            seq=self.seq,
            execution=as_compiled(MESHPAR, cluster.device.platform),
        )


@cache
def _traced(preset: str, sizes: str, seq: int) -> Workload | VolumeWorkload:
    """Return the workload of a preset whose arithmetic is traced.

    By the names of the modules, as the command does: they need jax, as no other step.
    """
    presets = import_module("meshpar.models.presets")
    given = key_values(sizes, noun="model", example="layers=4") if sizes else {}
    model = presets.build(preset, **{name: int(size) for name, size in given.items()})
    if not seq:
        return import_module("meshpar.planner.volume_traces").traced_volume(
            model, preset
        )
    tracer = import_module("meshpar.planner.from_model")
    return tracer.traced_workload(model, seq=seq, name=preset)


def as_compiled(execution: Execution, platform: str) -> Execution:
    """Return the execution of a program that was traced without its device."""
    if PLATFORMS[platform].fused_attention == "cudnn":
        return replace(execution, fused_attention=False)
    return execution


def _cluster(target: str) -> Cluster:
    name, _, shape = target.rpartition(":")
    hardware = next(own for own, theirs in TARGET_NAMES.items() if theirs == name)
    if name.startswith("tpu"):
        return cluster_of(f"{hardware}:{shape}")
    return cluster_of(hardware, devices=math.prod(map(int, shape.split("x"))))


@cache
def compiled_steps() -> tuple[CompiledStep, ...]:
    """Return the steps of `compiled_memory.json`."""
    rows = json.loads(FILE.read_text())["rows"]
    return tuple(CompiledStep(**row) for row in rows)


def compiled_memory() -> Iterator[Measured]:
    """Yield the memory of every compiled step, and the planner's."""
    for step in compiled_steps():
        yield Measured(
            source=SOURCE,
            name=step.name,
            quantity="compiled memory",
            unit="GB",
            measured=step.compiled_bytes / 1e9,
            predicted=step.plan.memory.total_bytes / 1e9,
        )
