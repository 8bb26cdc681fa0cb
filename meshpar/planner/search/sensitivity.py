"""Sensitivity: how much faster a plan would be on better hardware."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from meshpar.planner.cost.estimate import Estimate, step_on_s

_TWICE = 2
_CHANGES = {
    "network": "network_bytes_per_s",
    "in-host links": "link_bytes_per_s",
    "memory bandwidth": "memory_bytes_per_s",
    "peak FLOP/s": "peak_flops",
}
_TORUS_LINKS = {"in-host links": "torus links"}


class Sensitivity(NamedTuple):
    """What one change of the hardware does to a plan.

    Args:
        change: What is twice as good.
        step_s: Time of a step with it, under the same layout.
        faster: Part of the step's time that it saves.
    """

    change: str
    step_s: float
    faster: float

    @property
    def text(self) -> str:
        """`twice the network: 7 % faster`."""
        return f"twice the {self.change}: {self.faster:.1%} faster"

    def as_json(self) -> dict[str, Any]:
        """One entry of what `meshpar plan --json` prints."""
        return {"change": self.text, "step_s": self.step_s, "faster": self.faster}


def sensitivities(plan: Estimate) -> tuple[Sensitivity, ...]:
    """What doubling each number of the device saves, most first.

    Example:
        >>> from meshpar.planner.machine.clusters import cluster_of
        >>> from meshpar.planner.cost.estimate import estimate
        >>> from meshpar.planner.workload.shapes import SHAPES
        >>> plan = estimate(
        ...     SHAPES["llama3-8b"],
        ...     cluster_of("h100-80gb", devices=64),
        ...     "fsdp=64,remat=full,precision=bf16",
        ...     global_batch=64,
        ...     seq=8192,
        ... )
        >>> sensitivities(plan)[0].change
        'peak FLOP/s'
    """
    device = plan.run.cluster.device
    found = []
    for change, number in _CHANGES.items():
        better = replace(device, **{number: _doubled(getattr(device, number))})
        step_s = step_on_s(plan, better)
        name = _TORUS_LINKS.get(change, change) if device.torus_dims else change
        found.append(Sensitivity(name, step_s, 1 - step_s / plan.step_s))
    return tuple(sorted(found, key=lambda change: change.step_s))


def _doubled(value: Any) -> Any:
    if isinstance(value, float | int):
        return _TWICE * value
    return {key: _TWICE * number for key, number in value.items()}
