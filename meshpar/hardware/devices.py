"""Every device that is known, by each of its names: one table for all who ask.

A new one is an entry of `gpus` or `tpus`.
"""

from __future__ import annotations

import re

from meshpar.hardware.device import Device
from meshpar.hardware.gpus import GPUS
from meshpar.hardware.tpus import TPUS

_KNOWN = (*GPUS, *TPUS)

DEVICES = {known.device.name: known.device for known in _KNOWN}
"""What `--hardware` knows by name."""

OTHER_NAMES = {known.other_name: known.device for known in _KNOWN if known.other_name}
"""The same by a shorter name."""

TARGET_OF = {known.device.name: known.target for known in _KNOWN if known.target}
"""Name of a device -> what `meshpar audit --target` calls it, sizes left out."""

# An H800 is compiled for as an H100, whose entry comes first.
TARGETS = {known.target: known.device for known in reversed(_KNOWN) if known.target}
"""What `meshpar audit --target` knows, sizes left out."""

# Words of a device kind whose figures are others: cards on PCIe, NVL cards (bridged to
# few others, not to the whole host), slices of a card (MIG has no NVLink).
_OTHER_CARDS = {"PCIE", "NVL", "MIG"}


def device_of_kind(device_kind: str) -> Device | None:
    """The accelerator that JAX calls so; None if it is none of these.

    Cards of one name and several memory sizes are alike but for that size.

    Example:
        >>> device_of_kind("NVIDIA GB200").name, device_of_kind("NVIDIA H100 PCIe")
        ('gb200-186gb', None)
        >>> device_of_kind("TPU v5 lite").name
        'tpu-v5e'
    """
    words = set(re.split(r"[^A-Z0-9]+", device_kind.upper()))
    names = set() if words & _OTHER_CARDS else {*words, device_kind}
    return next((known.device for known in _KNOWN if known.kind in names), None)
