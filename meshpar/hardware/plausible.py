"""What the numbers of a device can be: beyond it is a slip of the pen, not a device."""

from __future__ import annotations

from meshpar.errors import InputError

_RATE = (1e3, 1e18)
"""Bytes per second: from a modem's to a thousand times a wafer's memory (20 PB/s)."""

PLAUSIBLE: dict[str, tuple[float, float]] = {
    "memory_bytes": (1e3, 1e15),
    "memory_bytes_per_s": _RATE,
    "link_bytes_per_s": _RATE,
    "network_bytes_per_s": _RATE,
    "host_bytes_per_s": _RATE,
    "peak_flops": (1e3, 1e21),
    "domain_devices": (1, 1_000_000),
    "wraps": (1, 1_000_000),
    "torus_dims": (0, 6),  # of any machine built: Fujitsu's Tofu (Ajima et al. 2009)
    "attention_head_dim": (0, 1e6),
    "hop_s": (0, 1),
    "network_hop_s": (0, 1),
    "launch_s": (0, 1),
    "spread": (0, 1),
    "collective_cores": (0, 1),
}
"""Field of `Device` or `Efficiency` -> its least and its most, in its own unit."""


def check_plausible(owner: str, name: str, value: float) -> None:
    """Passes a number that a device can have.

    Args:
        owner: What errors call the device.
        name: A field, or a field and what it is of (`peak_flops bf16`).
        value: Its value.

    Raises:
        InputError: It is out of the field's range.
    """
    least, most = PLAUSIBLE.get(name.split()[0], (float("-inf"), float("inf")))
    if not least <= value <= most:
        raise InputError(
            f"{owner} {name}={value:g}: must be at least {least:g} and at most "
            f"{most:g}; look at its unit",
            key="hardware.implausible_number",
        )
