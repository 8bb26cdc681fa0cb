"""Assumptions: numbers of a device that nobody measured, and which plan hangs on them.

Every number is tried 1.25 times smaller and larger, the others as they are. It decides
where another of the plans would then be the fastest by 1 % or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from meshpar.hardware.device import Device
from meshpar.hardware.devices import ASSUMED
from meshpar.planner.cost.seconds import HOST_SHARE
from meshpar.planner.plan import Plan

_FACTORS = (1 / 1.25, 1.25)
_LEAST_GAIN = 0.01
_COMPARED = 5
"""Plans that are timed again, the fastest first."""

_WORDS = {
    "matmul": "matmuls achieve {} of the peak",
    "attention": "the attention kernel achieves {} of the peak with very large heads",
    "memory": "elementwise work achieves {} of the memory's bandwidth",
    "link": "collectives achieve {} of the links inside",
    "network": "collectives achieve {} of the network",
    "host": "copies achieve {} of the link to the host's memory",
}


class Assumption(NamedTuple):
    """A number of the device that was taken, not measured.

    Args:
        number: The number in words.
        at: The value at which another plan is the fastest; 0 if the number decides
            nothing.
        layout: That plan's layout.
        faster: Part of the step's time by which it is faster then.
    """

    number: str
    at: float = 0.0
    layout: str = ""
    faster: float = 0.0

    @property
    def decides(self) -> bool:
        """True if another plan would be the fastest at another value."""
        return bool(self.layout)

    @property
    def text(self) -> str:
        """Sentence that names the number, and what it decides."""
        if not self.decides:
            return f"assumed, not measured: {self.number}; it decides nothing here"
        return (
            f"assumed, not measured, and it decides: {self.number}; at {self.at:.2g} "
            f"the fastest is {self.layout}, by {self.faster:.1%}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return an entry of `assumptions` of `meshpar plan --json`."""
        return {**self._asdict(), "decides": self.decides}


def guess_note(device: Device) -> str:
    """Return a note that a device's times are a guess; empty if they are calibrated."""
    if not device.taken_from:
        return ""
    return (
        f"no published step times calibrate {device.name}: it is taken to achieve what "
        f"{device.taken_from} achieves of its peaks, attention kernels included, so "
        "that its times are a guess; meshpar calibrate measures"
    )


def assumptions(plans: Sequence[Plan]) -> tuple[Assumption, ...]:
    """Return the assumed numbers behind plans, those that decide first.

    Args:
        plans: Plans on one machine, the fastest first.
    """
    compared = plans[:_COMPARED]
    device = plans[0].run.cluster.device
    names = [*ASSUMED.get(device.name, ())]
    layouts = [plan.run.layout for plan in compared]
    offloads = any(one.residual_names and one.residual_names.offload for one in layouts)
    if offloads or any(one.optimizer_memory == "host" for one in layouts):
        names.append("host")
    found = [_tried(compared, device, name) for name in names]
    return tuple(sorted(found, key=lambda one: -one.faster))


def _tried(plans: Sequence[Plan], device: Device, name: str) -> Assumption:
    """Return an assumption with the plan that gains most at another value."""
    value = HOST_SHARE if name == "host" else getattr(device.efficiency, name)
    found = Assumption(_WORDS[name].format(f"{value:g}"))
    for factor in _FACTORS:
        at = min(1.0, factor * value)
        changed = _changed(device, name, at)
        first_s, *seconds = [plan.step_on_s(changed) for plan in plans]
        for plan, step_s in zip(plans[1:], seconds, strict=True):
            faster = 1 - step_s / first_s
            if faster >= max(_LEAST_GAIN, found.faster):
                found = found._replace(
                    at=at, layout=plan.run.layout_text, faster=faster
                )
    return found


def _changed(device: Device, name: str, value: float) -> Device:
    """Return the device with another value of an assumed number."""
    if name == "host":
        rate = device.host_bytes_per_s * value / HOST_SHARE
        return replace(device, host_bytes_per_s=rate)
    efficiency: Any = {name: value}
    return replace(device, efficiency=replace(device.efficiency, **efficiency))
