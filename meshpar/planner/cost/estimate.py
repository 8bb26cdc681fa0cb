"""Estimate of one layout: memory, time and communication of a step, and their text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshpar.hardware.device import Device
from meshpar.layout import Layout
from meshpar.layout.requirements import OPTIONS, Facts, problems
from meshpar.planner.cost.memory import Memory, fullest_memory
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.step_time import StepTime, step_time
from meshpar.planner.cost.step_traffic import Sent, sent_in_a_step
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.execution import MESHPAR, Execution
from meshpar.planner.workload.problems import layout_problems, layout_stage_blocks
from meshpar.planner.workload.workload import Workload

_ONCE = "gradients are reduced once, behind the last backward"
_WHY_EXPOSED = {
    "tensor": "sums of the residual stream stand between a block's matmuls",
    "fsdp": "weights and gradients take longer than the layer's work beside them",
    "data": _ONCE,
    "stage": "a stage waits for its input and, where shared, for embedding and head",
    "context": "keys and values take longer than the attention beside them",
    "expert": "tokens must reach their experts before these can start",
}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated memory, time and communication of a step under one layout.

    Args:
        run: Model, machine, layout, program and batch.
        memory: Bytes of the fullest rank's devices.
        time: Seconds of the step, by what they are spent on.
        collectives: Bytes that one device sends in a step, by mesh axes and kind.
    """

    run: Run
    memory: Memory
    time: StepTime
    collectives: tuple[Sent, ...]

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.time.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak of all devices in that time."""
        run = self.run
        peak_flops = run.peak_flops * run.cluster.num_devices
        return self.model_flops / (peak_flops * self.step_s)

    @property
    def model_flops(self) -> int:
        """FLOPs of one step, without recomputation."""
        run = self.run
        return run.workload.model_flops(global_batch=run.global_batch, seq=run.seq)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the global batch per second."""
        return self.run.global_batch * self.run.seq / self.step_s

    @property
    def fits(self) -> bool:
        """True if the fullest device has enough memory."""
        return self.memory.total_bytes <= self.run.cluster.device.usable_bytes

    @property
    def layout_text(self) -> str:
        """The layout as text."""
        return str(self.run.layout)

    def why_exposed(self, mesh_axis: str) -> str:
        """Return the reason why the step waits for a mesh axis."""
        layer_by_layer = self.run.layout.zero == 3 and not self.run.gathers_once
        if mesh_axis == "fsdp" and not layer_by_layer:
            return _ONCE
        return _WHY_EXPOSED[mesh_axis]

    def as_json(self) -> dict[str, Any]:
        """Return what `meshpar estimate --json` prints."""
        return {
            "layout": str(self.run.layout),
            "step_s": self.step_s,
            "mfu": self.mfu,
            "tokens_per_s": self.tokens_per_s,
            "half_network_step_s": at_half_network_s(self),
            "fits": self.fits,
            "attention": self.run.attention.words,
            "memory": {
                **self.memory.as_json(),
                "capacity_bytes": round(self.run.cluster.device.memory_bytes),
                "usable_bytes": round(self.run.cluster.device.usable_bytes),
            },
            "time": self.time.as_json(),
            "collectives": [
                {
                    **collective._asdict(),
                    "mesh_axes": list(collective.mesh_axes),
                    "wire_bytes": round(collective.wire_bytes),
                }
                for collective in self.collectives
            ],
        }


def estimate(
    workload: Workload,
    cluster: Cluster,
    layout: Layout | str,
    *,
    global_batch: int,
    seq: int | None = None,
    execution: Execution = MESHPAR,
    stage_blocks: tuple[int, ...] | None = None,
) -> Estimate:
    """Estimate memory, time and communication of one step.

    Args:
        workload: The model's shape.
        cluster: The devices.
        layout: The layout; a -1 absorbs the remaining devices.
        global_batch: Sequences in a step.
        seq: Tokens of a sequence; the workload's own when absent.
        execution: The program that runs it.
        stage_blocks: Blocks of every stage, where the layout cannot express it (a
            published run with none on its first stage).

    Raises:
        InputError: The layout is impossible; `layout_problems` has all reasons.

    Example:
        >>> from meshpar.planner.machine.clusters import cluster_of
        >>> from meshpar.planner.workload.shapes import SHAPES
        >>> plan = estimate(
        ...     SHAPES["llama3-8b"],
        ...     cluster_of("h100-80gb", devices=8),
        ...     "fsdp=8,remat=full,precision=bf16",
        ...     global_batch=16,
        ...     seq=8192,
        ... )
        >>> plan.fits, 0.3 < plan.mfu < 0.6
        (True, True)
    """
    layout = Layout.of(layout).resolve(cluster.num_devices)
    seq = seq or workload.seq
    # Programs of others may take options that mean nothing to ours.
    options = () if execution.eager else problems(Facts(layout=layout), OPTIONS)
    found = layout_problems(
        workload,
        layout,
        global_batch=global_batch,
        seq=seq,
        stage_blocks=stage_blocks,
        execution=execution,
    )
    for problem in (*options, *found):
        raise problem.error(layout)
    return estimate_run(
        Run(
            workload=workload,
            cluster=cluster,
            layout=layout,
            execution=execution,
            global_batch=global_batch,
            seq=seq,
            stage_blocks=stage_blocks or layout_stage_blocks(workload, layout),
        )
    )


def estimate_run(run: Run) -> Estimate:
    """Estimate a run whose layout is known to be possible."""
    return Estimate(
        run=run,
        memory=fullest_memory(run),
        time=step_time(run),
        collectives=sent_in_a_step(run),
    )


def at_half_network_s(plan: Estimate) -> float:
    """Return the seconds of a step with half the bandwidth between hosts.

    Or of a torus' links. Other jobs, routes and many hosts reduce this bandwidth first,
    and no data sheet says by how much.
    """
    device = plan.run.cluster.device
    halved = replace(device, network_bytes_per_s=device.network_bytes_per_s / 2)
    if device.torus_dims:
        halved = replace(halved, link_bytes_per_s=device.link_bytes_per_s / 2)
    return step_on_s(plan, halved)


def step_on_s(plan: Estimate, device: Device) -> float:
    """Return the seconds of a step on as many other devices, under the same layout."""
    cluster = replace(plan.run.cluster, device=device)
    return step_time(replace(plan.run, cluster=cluster)).step_s


def gigabytes(num_bytes: float) -> str:
    """Format bytes with three digits and a unit.

    Example:
        >>> gigabytes(12.34e9), gigabytes(1234e9), gigabytes(12.3e3), gigabytes(0)
        ('12.3 GB', '1,234 GB', '12.3 kB', '0 GB')
    """
    for unit, size, least in (("GB", 1e9, 1e8), ("MB", 1e6, 1e6), ("kB", 1e3, 1e3)):
        if num_bytes >= least:
            return f"{_three_digits(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B" if num_bytes >= 1 else "0 GB"


def milliseconds(seconds: float) -> str:
    """Format seconds with three digits and a unit; less than a microsecond is 0 ms.

    Example:
        >>> milliseconds(0.0123), milliseconds(12.3), milliseconds(1.78e-15)
        ('12.3 ms', '12.3 s', '0 ms')
    """
    if seconds >= 0.9995:
        return f"{_three_digits(seconds)} s"
    return f"{_three_digits(seconds * 1e3 if seconds >= 1e-6 else 0.0)} ms"


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}"


def estimate_in_words(estimate: Estimate) -> list[str]:
    """Return lines of text: model and machine, memory, time, communication."""
    return [
        *_heading(estimate),
        *_memory(estimate),
        *_time(estimate),
        *_links(estimate),
    ]


def _heading(estimate: Estimate) -> list[str]:
    run = estimate.run
    number, count = run.workload.num_parameters, run.layout.microbatches
    size = f"{number / 1e9:.3g} B" if number >= 1e8 else f"{number / 1e6:.3g} M"
    each = f"{count} microbatch{'es' if count > 1 else ''} of {run.microbatch}"
    return [
        f"{run.workload.name}: {size} parameters on {run.cluster.text}, run as "
        f"{run.execution.name}",
        f"layout {run.layout}: {run.global_batch} sequences of {run.seq} tokens, "
        f"{each} on a device",
        *filter(None, (run.attention.words,)),
    ]


def _memory(estimate: Estimate) -> list[str]:
    memory, run = estimate.memory, estimate.run
    device = run.cluster.device
    kept = device.memory_bytes - device.usable_bytes
    reserve = f", {gigabytes(kept)} left in reserve" if kept else ""
    verdict = "fits" if estimate.fits else "does not fit"
    at_stage = f" at stage {memory.stage}" if run.layout.stage > 1 else ""
    flight = f"{memory.in_flight:g} microbatches in flight"
    return [
        f"memory {gigabytes(memory.total_bytes)} of {gigabytes(device.memory_bytes)}"
        f"{at_stage}: {verdict}{reserve}",
        f"  parameters {gigabytes(memory.parameter_bytes)}, gradients "
        f"{gigabytes(memory.gradient_bytes)}, optimizer "
        f"{gigabytes(memory.optimizer_bytes)}",
        f"  activations {gigabytes(memory.activation_bytes)} ({flight}, "
        f"remat={run.layout.remat})",
        f"  logits {gigabytes(memory.logit_bytes)}, gathered weights "
        f"{gigabytes(memory.gathered_bytes)}, workspace "
        f"{gigabytes(memory.workspace_bytes)}",
    ]


def _time(estimate: Estimate) -> list[str]:
    time, step_s = estimate.time, estimate.step_s
    slow = milliseconds(at_half_network_s(estimate))
    lines = [
        f"step {milliseconds(step_s)}, MFU {estimate.mfu:.1%}, "
        f"{estimate.tokens_per_s:,.0f} tokens/s",
        f"  computing {_share(time.compute_s, step_s)}, bubble "
        f"{_share(time.bubble_s, step_s)}, optimizer "
        f"{_share(time.optimizer_s, step_s)}, slowest of all devices "
        f"{_share(time.straggler_s, step_s)}",
        f"  at half the network's bandwidth {slow}",
    ]
    if time.host_s:
        lines.append(f"  waiting for the host {_share(time.host_s, step_s)}")
    for mesh_axis, seconds in time.exposed_s.items():
        link = estimate.run.link(mesh_axis).name
        why = estimate.why_exposed(mesh_axis)
        lines.append(
            f"  exposed on {mesh_axis} ({link}) {_share(seconds, step_s)}: {why}"
        )
    return lines


def _links(estimate: Estimate) -> list[str]:
    return [
        f"  {'+'.join(collective.mesh_axes)} {collective.kind} over the "
        f"{collective.link}: {gigabytes(collective.wire_bytes)} sent by a device, "
        f"{collective.reason}"
        for collective in estimate.collectives
    ]


def _share(seconds: float, step_s: float) -> str:
    return f"{milliseconds(seconds)} ({seconds / step_s:.1%})"
