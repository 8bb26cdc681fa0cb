"""How much of its data sheet a device achieves."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from meshpar.errors import InputError
from meshpar.hardware.plausible import check_plausible


def is_number(value: object) -> bool:
    """Whether a value of a device's file is a number; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """How much of its data sheet a device achieves: one set a device.

    Args:
        matmul: Fraction of the peak that a matmul of infinite size achieves. A finite
            one takes the time of its operands' traffic besides, so that its fraction
            saturates with its arithmetic intensity.
        attention: The same of the fused attention kernel that this library runs there,
            with very large heads; of others `Device.attention_kernels` says it.
        attention_head_dim: Head size at which such a kernel spends as long on softmax
            as on matmuls, so that it achieves half of `attention`.
        memory: Fraction of the memory's bandwidth that elementwise kernels achieve.
        link: Fraction of the in-host link (or torus link) that collectives achieve.
        network: Fraction of the network between hosts that they achieve.
        hop_s: Latency of one step of a collective in a host, or on a torus.
        network_hop_s: Latency of one step between hosts.
        launch_s: Time between the end of a kernel and the start of the next one.
        spread: Standard deviation of a device's step time, as a fraction of it.
        collective_cores: Share of the device's cores that a collective takes from the
            kernels beside it; 0 where engines of their own move the bytes.

    Raises:
        InputError: A fraction outside of 0 to 1, or a time that no device has.
    """

    matmul: float
    attention: float
    attention_head_dim: float
    memory: float
    link: float
    network: float
    hop_s: float
    network_hop_s: float
    launch_s: float
    spread: float
    collective_cores: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            if not is_number(getattr(self, one.name)):
                raise InputError(
                    f"efficiency {one.name}={getattr(self, one.name)!r}: must be a "
                    "number",
                    key="hardware.not_a_number",
                )
        for name in ("matmul", "attention", "memory", "link", "network"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(
                    f"efficiency {name}={getattr(self, name)}: must be above 0 and at "
                    "most 1, a fraction of the data sheet's number",
                    key="hardware.not_a_fraction",
                )
        for name in (
            "attention_head_dim",
            "hop_s",
            "network_hop_s",
            "launch_s",
            "spread",
            "collective_cores",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(
                    f"efficiency {name}={getattr(self, name)}: must be 0 or more",
                    key="hardware.negative_or_infinite",
                )
            check_plausible("efficiency", name, getattr(self, name))
