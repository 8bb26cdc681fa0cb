"""Why a layout is not among the plans, with the numbers that decide it."""

from __future__ import annotations

from typing import NamedTuple

from meshpar.layout import Layout
from meshpar.planner.cost.estimate import (
    Estimate,
    estimate_run,
    gigabytes,
    milliseconds,
)
from meshpar.planner.cost.run import Run


class Rejected(NamedTuple):
    """A layout and its reason.

    Args:
        layout: The layout.
        reason: What it takes, what there is, and where.
        key: Stable name of the reason, as of an `InputError`.
    """

    layout: Layout
    reason: str
    key: str


def rejected(run: Run, capacity_bytes: float, slowest: Estimate | None) -> Rejected:
    """Why a possible layout is no plan: it does not fit, or others are faster.

    Args:
        run: The layout.
        capacity_bytes: What a device may hold.
        slowest: The slowest of the plans, if there are any.
    """
    found = estimate_run(run)
    if found.memory.total_bytes > capacity_bytes:
        why, key = too_large(found, capacity_bytes), "plan.too_large"
    elif slowest is None or found.step_s <= slowest.step_s:
        why = f"{milliseconds(found.step_s)}: as good as a plan"
        key = "plan.as_good_as_a_plan"
    else:
        why, key = too_slow(found, slowest), "plan.too_slow"
    return Rejected(run.layout, why, key)


def too_large(found: Estimate, capacity_bytes: float) -> str:
    """What fills the memory: `activations 97 GB > 80 GB at stage 0: ...`."""
    memory, layout = found.memory, found.run.layout
    parts = _parts(found)
    name, size, why = max(parts, key=lambda part: part[1])
    at = f" at stage {memory.stage}" if layout.stage > 1 else ""
    capacity = gigabytes(capacity_bytes)
    if size > capacity_bytes:
        return f"{name} {gigabytes(size)} > {capacity}{at}: {why}"
    rest = gigabytes(memory.total_bytes - size)
    return (
        f"{name} {gigabytes(size)} and all else {rest} = "
        f"{gigabytes(memory.total_bytes)} > {capacity}{at}: {why}"
    )


def _parts(found: Estimate) -> tuple[tuple[str, float, str], ...]:
    memory, run = found.memory, found.run
    layout, shards = run.layout, run.layout.fsdp * run.layout.tensor
    count = f"{memory.in_flight:g}"
    plural = "" if count == "1" else "s"
    return (
        (
            "activations",
            memory.activation_bytes,
            f"{count} microbatch{'es' if plural else ''} of {run.microbatch} in flight "
            f"with remat={layout.remat}",
        ),
        (
            "parameters, gradients and optimizer state",
            memory.state_bytes,
            f"split over {shards * layout.stage * layout.expert} of "
            f"{layout.num_devices} devices",
        ),
        (
            "logits",
            memory.logit_bytes,
            f"{run.tokens} tokens of a microbatch over tensor={layout.tensor}",
        ),
        (
            "workspace",
            memory.workspace_bytes,
            f"what a tick makes anew of {run.tokens} tokens of a microbatch",
        ),
        (
            "gathered weights",
            memory.gathered_bytes,
            f"parameters whole or cast for use, over tensor={layout.tensor}",
        ),
    )


def too_slow(found: Estimate, slowest: Estimate) -> str:
    """Where the time goes: `tensor=16 crosses hosts: 3.1 s exposed; 9 s > 4 s ...`."""
    cause, seconds, of_plan = max(
        _causes(found, slowest), key=lambda cause: cause[1] - cause[2]
    )
    return (
        f"{cause} against {milliseconds(of_plan)}; a step takes "
        f"{milliseconds(found.step_s)} > {milliseconds(slowest.step_s)} of the slowest "
        "plan"
    ).replace("{}", milliseconds(seconds))


def _causes(found: Estimate, slowest: Estimate) -> list[tuple[str, float, float]]:
    """What takes how long, here and there; `{}` stands for the time here."""
    time, other, layout = found.time, slowest.time, found.run.layout
    causes = [
        (_crossing(found, axis), seconds, other.exposed_s.get(axis, 0.0))
        for axis, seconds in time.exposed_s.items()
    ]
    bubble = (
        f"stage={layout.stage} with {layout.microbatches} microbatches waits {{}} in "
        "the bubble"
    )
    size = found.run.microbatch
    computing = f"remat={layout.remat} with microbatches of {size} computes {{}}"
    return [
        *causes,
        (bubble, time.bubble_s, other.bubble_s),
        (computing, time.compute_s, other.compute_s),
        ("the optimizer takes {}", time.optimizer_s, other.optimizer_s),
    ]


def _crossing(found: Estimate, mesh_axis: str) -> str:
    run = found.run
    size = getattr(run.layout, mesh_axis)
    place = {
        "network": "crosses hosts",
        "host": "inside a host",
        "torus": "on the torus",
    }.get(run.link(mesh_axis).name, "on its devices")
    return f"{mesh_axis}={size} {place}: {{}} exposed"
