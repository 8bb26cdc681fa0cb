"""Text of an estimate: what fills the memory, what takes the time, and why."""

from __future__ import annotations

from meshpar.planner.cost.estimate import (
    Estimate,
    at_half_network_s,
    gigabytes,
    milliseconds,
)


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
