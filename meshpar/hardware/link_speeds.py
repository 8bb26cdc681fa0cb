"""Speeds of the links between accelerators, as their makers state them."""

from __future__ import annotations

import re
from typing import NamedTuple


class LinkSpeeds(NamedTuple):
    """Bytes per second and direction of one device.

    Args:
        host_bytes_per_s: To the other devices of its host (NVLink).
        network_bytes_per_s: To other hosts.
    """

    host_bytes_per_s: float
    network_bytes_per_s: float


# Inside a host: half the NVLink figure of NVIDIA's data sheets, which count both
# directions (A100 2021-06, H100 2023-03, H800 2023-03, H200 2024-11, B200 2025-02).
# Between hosts: one network port per GPU as in NVIDIA's DGX
# systems (200 Gb/s A100, 400 Gb/s later).
NVIDIA_LINKS = {
    "A100": LinkSpeeds(300e9, 25e9),
    "H100": LinkSpeeds(450e9, 50e9),
    "H800": LinkSpeeds(200e9, 50e9),
    "H200": LinkSpeeds(450e9, 50e9),
    "B200": LinkSpeeds(900e9, 50e9),
}
"""Words of JAX's device kinds -> speeds of the links."""

# Words of a device kind whose figures are others: cards on PCIe, NVL cards (bridged to
# few others, not to the whole host), slices of a card (MIG has no NVLink).
_OTHER_CARDS = {"PCIE", "NVL", "MIG"}


def card_words(device_kind: str) -> set[str]:
    """The words of a device kind that say which card it is; none of other cards.

    Example:
        >>> sorted(card_words("NVIDIA H100 80GB HBM3")), card_words("NVIDIA H100 NVL")
        (['80GB', 'H100', 'HBM3', 'NVIDIA'], set())
    """
    words = set(re.split(r"[^A-Z0-9]+", device_kind.upper()))
    return set() if words & _OTHER_CARDS else words
