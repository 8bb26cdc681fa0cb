"""A cluster: devices of one kind, and the link that each mesh axis runs on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshpar.errors import InputError
from meshpar.hardware.device import Device
from meshpar.layout import Layout
from meshpar.planner.machine.link import Link, Span


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices of one kind, joined.

    Args:
        device: The device.
        hosts: Link domains (hosts, or racks of GB200); slices of a torus.
        devices_per_host: Devices of each; the device's own when 0.
        torus: Sizes of a slice's torus; () where the device has none.

    Raises:
        InputError: A count below 1, or a torus of other dims than the device's.

    Example:
        >>> from meshpar.planner.machine.clusters import cluster_of
        >>> cluster_of("h100-80gb", devices=64).hosts
        8
        >>> cluster_of("tpu v5p:8x8x8").num_devices
        512
    """

    device: Device
    hosts: int = 1
    devices_per_host: int = 0
    torus: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.devices_per_host < 0:
            raise InputError(
                f"hosts={self.hosts} of devices_per_host={self.devices_per_host}: must "
                "be at least 1 each",
                key="hardware.count_below_one",
            )
        if any(size < 1 for size in self.torus):
            raise InputError(
                f"torus {self._shape}: every size must be at least 1",
                key="hardware.torus_size_below_one",
            )
        if self.torus and len(self.torus) != self.device.torus_dims:
            raise InputError(
                f"torus {self._shape} has {len(self.torus)} dims, but "
                f"{self.device.name} has {self.device.torus_dims}; give as many sizes",
                key="hardware.wrong_torus_dims",
            )
        most = self.device.pod_devices
        if self.torus and most and math.prod(self.torus) > most:
            raise InputError(
                f"torus {self._shape} has {math.prod(self.torus)} devices, but a slice "
                f"of {self.device.name} has at most {most}; take several slices "
                f"(--hosts {-(-math.prod(self.torus) // most)})",
                key="hardware.torus_too_large",
            )
        if not self.devices_per_host:
            size = math.prod(self.torus) if self.torus else self.device.domain_devices
            object.__setattr__(self, "devices_per_host", size)

    @property
    def _shape(self) -> str:
        return "x".join(map(str, self.torus))

    @property
    def num_devices(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.devices_per_host

    @property
    def text(self) -> str:
        """How reports name it."""
        if self.torus:
            slices = f"{self.hosts} x " if self.hosts > 1 else ""
            return f"{slices}{self.device.name} {self._shape}"
        hosts = f"{self.hosts} host{'s' if self.hosts > 1 else ''}"
        return f"{self.num_devices} x {self.device.name} on {hosts}"

    def link(self, layout: Layout, *mesh_axes: str) -> Link:
        """What a collective over these mesh axes of a layout together runs on."""
        return self.link_of(layout.mesh_shape, mesh_axes)

    def link_of(self, mesh_shape: Mapping[str, int], mesh_axes: Sequence[str]) -> Link:
        """What a collective over these mesh axes of any mesh together runs on.

        Devices are numbered row-major over the mesh axes, the last innermost (`tensor`
        of a layout), hosts filled one after another, as `meshpar.machine.mesh` does it.

        Args:
            mesh_shape: Size of each mesh axis, outermost first.
            mesh_axes: Those of the collective.
        """
        members = math.prod(mesh_shape[axis] for axis in mesh_axes)
        if members == 1:
            return Link(name="none", bytes_per_s=math.inf, hop_s=0.0)
        inner = self._members_in_one_host(mesh_shape, mesh_axes)
        device, achieved = self.device, self.device.efficiency
        if self.torus and inner == members:
            return self._torus_link(mesh_shape, mesh_axes, members)
        if inner == members:
            return Link(
                name="host",
                bytes_per_s=device.link_bytes_per_s * achieved.link,
                hop_s=achieved.hop_s,
            )
        # A ring through every host leaves it by one member's port; with as many rings
        # as members in a host, all their ports carry a share (NCCL's channels), as far
        # as the links inside bring them there.
        port = device.network_bytes_per_s * achieved.network
        inside = device.link_bytes_per_s * achieved.link
        if self.torus and inner > 1:
            inside = self._torus_link(mesh_shape, mesh_axes, inner).bytes_per_s
        return Link(
            name="network",
            bytes_per_s=min(port * inner, inside),
            port_bytes_per_s=port,
            hop_s=achieved.network_hop_s,
            inner=inner,
            inner_hop_s=achieved.hop_s,
        )

    def _members_in_one_host(
        self, mesh_shape: Mapping[str, int], mesh_axes: Sequence[str]
    ) -> int:
        """Members of a group whose devices fill one host, or part of it."""
        if self.hosts == 1:
            return math.prod(mesh_shape[axis] for axis in mesh_axes)
        room, inner = self.devices_per_host, 1
        for axis, size in reversed(list(mesh_shape.items())):
            here = size if room % size == 0 else math.gcd(size, room)
            inner *= here if axis in mesh_axes else 1
            room = room // size if here == size else 1
        return inner

    def _torus_link(
        self, mesh_shape: Mapping[str, int], mesh_axes: Sequence[str], members: int
    ) -> Link:
        """Rings along the dims of the torus that these mesh axes cover."""
        spans, device = self._torus_spans(mesh_shape, mesh_axes), self.device
        if math.prod(span.size for span in spans) != members:
            # The sizes share no factors: one line through all of them.
            spans = (Span(members, 1),)
        one = device.link_bytes_per_s * device.efficiency.link
        return Link(
            name="torus",
            bytes_per_s=one * sum(span.links for span in spans),
            port_bytes_per_s=one,
            hop_s=device.efficiency.hop_s,
            spans=spans,
            scatters_whole=self._scatters_whole(members),
        )

    def _scatters_whole(self, members: int) -> bool:
        """Whether XLA:TPU all-reduces where a program reduce-scatters.

        A rule made from what the libtpu of jax 0.10.2 compiled (2026-11-21): so over
        all of a slice of three dims (v5p 2x2x2, 2x2x4, 4x4x4) and of a square (v5e, v6e
        4x4, 8x8); not over 2x2x1, 2x2, 2x4, 4x8, nor over part of a slice.
        """
        if self.hosts > 1 or members != math.prod(self.torus):
            return False
        if len(self.torus) == 3:
            return min(self.torus) > 1
        return len(set(self.torus)) == 1 and self.torus[0] >= 4

    def _torus_spans(
        self, mesh_shape: Mapping[str, int], mesh_axes: Sequence[str]
    ) -> tuple[Span, ...]:
        """What a group of these mesh axes covers of each torus dim."""
        left, covered = list(self.torus), [1] * len(self.torus)
        for axis, size in reversed(list(mesh_shape.items())):
            for dim, room in enumerate(left):
                here = math.gcd(size, room)
                left[dim], size = room // here, size // here
                covered[dim] *= here if axis in mesh_axes else 1
        return tuple(
            Span(size, 2 if size == whole and self._wraps(whole) else 1)
            for size, whole in zip(covered, self.torus, strict=True)
            if size > 1
        )

    def _wraps(self, size: int) -> bool:
        """Whether the ends of a dim of the slice are joined.

        Slices of three dims are built of cubes, whose faces optical switches join where
        every dim is whole cubes; a pod of two dims has links around its edges, which
        only a dim as long as the pod reaches.

        Reference: Cloud TPU documentation, "TPU v4" and "TPU v5e" (read 2025); Austin
        et al. 2025, "How to Scale Your Model", chapter 2.
        """
        wraps = self.device.wraps
        if len(self.torus) == 3:
            return all(each % wraps == 0 for each in self.torus)
        return size % wraps == 0
