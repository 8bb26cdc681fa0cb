"""Topologies: hosts, devices per host, and the link that each mesh axis crosses."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from meshpar.errors import InputError
from meshpar.hardware.devices import Device, device_from_kind
from meshpar.hardware.platforms import platform_named
from meshpar.layout import MESH_AXES, Layout

Crossing = Literal["none", "host", "network"]
"""The slowest link that a mesh axis crosses: none, a host's links, or the network."""

_HOST_GPUS = 8
"""Most GPUs of a host: links that join more, and a torus, span hosts."""


class TopologyWarning(UserWarning):
    """Warning that a layout puts much traffic on a slow link."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Hosts of equal size, numbered so that devices of one host are neighbours.

    Args:
        hosts: Number of hosts.
        devices_per_host: Devices that share a host's fast link.
        host_bytes_per_s: Speed of this link, per device and direction, if known.
        network_bytes_per_s: Speed between hosts, per device and direction, if known.

    Raises:
        InputError: A count or speed is not positive.

    Example:
        >>> topology = Topology(hosts=2, devices_per_host=4)
        >>> topology.links(Layout(data=2, tensor=4))["tensor"]
        'host'
    """

    hosts: int
    devices_per_host: int
    host_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("hosts", "devices_per_host"):
            if getattr(self, name) < 1:
                raise InputError(
                    f"{name}={getattr(self, name)}: must be at least 1",
                    key="value.below_one",
                )
        for name in ("host_bytes_per_s", "network_bytes_per_s"):
            speed = getattr(self, name)
            if speed is not None and not speed > 0:
                raise InputError(
                    f"{name}={speed}: must be positive, or None if unknown",
                    key="value.not_positive",
                )

    @classmethod
    def from_devices(cls, devices: Sequence[jax.Device]) -> Topology:
        """Return the topology of real devices, with link speeds if the kind is known.

        Raises:
            InputError: Hosts have different numbers of devices.
        """
        domains = device_domains(devices)
        per_host = Counter(domains)
        if len(set(per_host.values())) != 1:
            raise InputError(
                f"hosts hold {dict(per_host)} devices (host: count); every host must "
                "hold the same number: choose the devices to use",
                key="mesh.uneven_hosts",
            )
        kind = _known_kind(devices[0])
        speeds: tuple[float | None, float | None] = None, None
        if kind and not kind.torus_dims and kind.domain_devices <= _HOST_GPUS:
            speeds = kind.link_bytes_per_s, kind.network_bytes_per_s
        return cls(
            hosts=len(per_host),
            devices_per_host=per_host[domains[0]],
            host_bytes_per_s=speeds[0],
            network_bytes_per_s=speeds[1],
        )

    @property
    def num_devices(self) -> int:
        """Return the number of devices on all hosts."""
        return self.hosts * self.devices_per_host

    def links(
        self, layout: Layout, order: Sequence[str] = MESH_AXES
    ) -> dict[str, Crossing]:
        """Return the slowest link that each mesh axis crosses; `none` for size 1.

        Devices are row-major over the mesh axes, so the groups of a mesh axis are in
        aligned spans of (its size x all sizes inside it) devices.

        Args:
            layout: Sizes of the mesh axes.
            order: All mesh axes, outermost first (`make_mesh`).
        """
        links: dict[str, Crossing] = {}
        sizes = layout.mesh_shape
        for position, mesh_axis in enumerate(order):
            span = math.prod(sizes[inner] for inner in order[position:])
            in_one_host = self.hosts == 1 or self.devices_per_host % span == 0
            crosses: Crossing = "host" if in_one_host else "network"
            links[mesh_axis] = "none" if sizes[mesh_axis] == 1 else crosses
        return links

    def warn_if_tensor_crosses_hosts(
        self, layout: Layout, order: Sequence[str] = MESH_AXES
    ) -> None:
        """Warn, with the cost, if `tensor` does not fit inside a host."""
        if self.links(layout, order)["tensor"] != "network":
            return
        warnings.warn(
            f"mesh axis 'tensor' of size {layout.tensor} crosses hosts of "
            f"{self.devices_per_host} devices: {self._network_cost()}; choose a "
            f"'tensor' that divides {self.devices_per_host}",
            TopologyWarning,
            stacklevel=3,
        )

    def _network_cost(self) -> str:
        every_block = "each block's four activation-sized collectives"
        if self.host_bytes_per_s is None or self.network_bytes_per_s is None:
            return f"{every_block} run at the speed of the network between hosts"
        ratio = self.host_bytes_per_s / self.network_bytes_per_s
        return (
            f"{every_block} run at {self.network_bytes_per_s / 1e9:g} GB/s instead of "
            f"{self.host_bytes_per_s / 1e9:g} GB/s, {ratio:.3g} times slower"
        )


def device_domains(devices: Sequence[Any]) -> list[int]:
    """Return the number of the fast-link domain of each device.

    JAX numbers slices of TPUs if there are several, and hosts or NVLink racks of GPUs
    (`slice_index`). If that number is absent, or one for more GPUs than NVLink joins of
    their kind (as for absent devices), each process counts as a host.
    """

    def slice_number(device: Any) -> int:
        platform = platform_named(getattr(device, "platform", ""))
        number = getattr(device, "slice_index", None)
        if not platform.is_host and number is not None:
            return number
        return 0 if platform.has_torus else device.process_index

    def is_too_large(num_devices: int, device: Any) -> bool:
        """Return True if no link joins so many GPUs of this kind."""
        known = _known_kind(device)
        if known is None or known.torus_dims:
            return False
        return num_devices > known.domain_devices

    slices = [slice_number(device) for device in devices]
    sizes = Counter(slices)
    keys = [
        (number, device.process_index if is_too_large(sizes[number], device) else 0)
        for number, device in zip(slices, devices, strict=True)
    ]
    numbers = {key: number for number, key in enumerate(sorted(set(keys)))}
    return [numbers[key] for key in keys]


def _known_kind(device: Any) -> Device | None:
    """Return the data of a device's kind; None for a CPU or a kind without any."""
    if platform_named(getattr(device, "platform", "")).is_host:
        return None
    return device_from_kind(getattr(device, "device_kind", ""))
