"""A cluster: devices of one kind or of several, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from meshpar.errors import InputError, renamed
from meshpar.hardware.device import Device
from meshpar.layout import Layout


class Span(NamedTuple):
    """Part of one dim of a torus that a group of devices covers.

    Args:
        size: Devices along the dim.
        links: Links of each device that the group's ring uses: two if its ends are
            joined, else one, since the way back takes the other directions.
    """

    size: int
    links: int


@dataclass(frozen=True, kw_only=True)
class Link:
    """Link that the collectives of a mesh axis run over.

    Args:
        name: Its name in reports: `none`, `chip`, `host`, `torus` or `network`.
        bytes_per_s: Rate that one device achieves in one direction of a ring.
        hop_s: Latency of one step.
        port_bytes_per_s: Rate from one device to one other: through its own port, or
            over one link of a torus or a mesh; `bytes_per_s` when 0.
        inner: Members of a group in one host; their ring steps stay inside.
        inner_hop_s: Latency of a step inside a host.
        spans: The group's part of each dim of a torus; () elsewhere.
        scatters_whole: True if a reduce-scatter runs as an all-reduce, of which each
            device keeps its part.
        rack: Link of those members that lie in one rack; None if all do.
        racks: Racks that the group spans; 1 if one.
        rack_members: Members in one rack.
        rack_bytes_per_s: Rate of a device to another rack, while all go there.
        rack_hop_s: Latency of a step to another rack.
    """

    name: str
    bytes_per_s: float
    hop_s: float
    port_bytes_per_s: float = 0.0
    inner: int = 1
    inner_hop_s: float = 0.0
    spans: tuple[Span, ...] = ()
    scatters_whole: bool = False
    rack: Link | None = None
    racks: int = 1
    rack_members: int = 1
    rack_bytes_per_s: float = math.inf
    rack_hop_s: float = 0.0

    @property
    def between_racks(self) -> Link:
        """Link of one member of each rack."""
        return Link(
            name=self.name, bytes_per_s=self.rack_bytes_per_s, hop_s=self.rack_hop_s
        )

    def __post_init__(self) -> None:
        if not self.port_bytes_per_s:
            object.__setattr__(self, "port_bytes_per_s", self.bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices joined by links.

    Args:
        device: The device; of several kinds what each of them has at least
            (`meshpar.planner.machine.mixed.joined`).
        hosts: Link domains (hosts, or racks of GB200); slices of a torus.
        devices_per_host: Devices of each; the device's own number when 0.
        torus: Sizes of a slice's torus, in chips (`Device.chip_devices`); () if the
            device has none.
        parts: Clusters of one kind each that the network joins, in the order of their
            devices; () if all devices are of one kind.

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
    parts: tuple[Cluster, ...] = ()

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
        in_slice = math.prod(self.torus) * self.device.chip_devices
        if self.torus and most and in_slice > most:
            raise InputError(
                f"torus {self._shape} has {in_slice} devices, but a slice "
                f"of {self.device.name} has at most {most}; take several slices "
                f"(--hosts {-(-in_slice // most)})",
                key="hardware.torus_too_large",
            )
        if not self.devices_per_host:
            size = in_slice if self.torus else self.device.domain_devices
            object.__setattr__(self, "devices_per_host", size)

    @property
    def _shape(self) -> str:
        return "x".join(map(str, self.torus))

    @property
    def num_devices(self) -> int:
        """Number of devices of all hosts."""
        return self.hosts * self.devices_per_host

    def peak_flops(self, precision: str) -> float:
        """Return the peak FLOP/s of all devices together."""
        if self.parts:
            return sum(part.peak_flops(precision) for part in self.parts)
        return self.num_devices * self.device.peak_flops[precision]

    def changed(self, change: Callable[[Device], Device]) -> Cluster:
        """Return the cluster with each device changed alike."""
        parts = tuple(part.changed(change) for part in self.parts)
        return replace(self, device=change(self.device), parts=parts)

    @property
    def text(self) -> str:
        """Name in reports."""
        if self.parts:
            return " + ".join(part.text for part in self.parts)
        if self.torus:
            slices = f"{self.hosts} x " if self.hosts > 1 else ""
            return f"{slices}{self.device.name} {self._shape}"
        hosts = f"{self.hosts} host{'s' if self.hosts > 1 else ''}"
        return f"{self.num_devices} x {self.device.name} on {hosts}"

    def link(self, layout: Layout, *mesh_axes: str) -> Link:
        """Return the link of a collective over these mesh axes of a layout together."""
        return self.mesh_link(layout.mesh_shape, mesh_axes)

    def mesh_link(
        self, mesh_shape: Mapping[str, int], mesh_axes: Sequence[str]
    ) -> Link:
        """Return the link of a collective over these axes of any mesh together.

        Devices are numbered row-major over the mesh axes, the last innermost (`tensor`
        of a layout), hosts filled one after another, as `meshpar.machine.mesh` does it.

        Args:
            mesh_shape: Size of each mesh axis, outermost first.
            mesh_axes: Mesh axes of the collective.
        """
        members = math.prod(mesh_shape[axis] for axis in mesh_axes)
        if members == 1:
            return Link(name="none", bytes_per_s=math.inf, hop_s=0.0)
        inner = self._members_in_one_host(mesh_shape, mesh_axes)
        device = self.device
        link = self._mesh_link(mesh_shape, mesh_axes, members, inner)
        in_rack = members
        if device.rack_devices:
            # As many whole hosts, or slices, as a rack has room for; one at least.
            hosts = max(1, device.rack_devices // self.devices_per_host)
            room = min(hosts, self.hosts) * self.devices_per_host
            in_rack = _members_within(room, mesh_shape, mesh_axes)
        if in_rack == members:
            return link
        # As many rings as members in a rack leave it, each with its part of the way.
        port = device.network_bytes_per_s * device.efficiency.network
        out = port / device.oversubscription
        return replace(
            link,
            bytes_per_s=min(link.bytes_per_s, out * in_rack),
            rack=self._mesh_link(mesh_shape, mesh_axes, in_rack, min(inner, in_rack)),
            racks=members // in_rack,
            rack_members=in_rack,
            rack_bytes_per_s=out,
            rack_hop_s=device.rack_hop_s or device.efficiency.network_hop_s,
        )

    def _mesh_link(
        self,
        mesh_shape: Mapping[str, int],
        mesh_axes: Sequence[str],
        members: int,
        inner: int,
    ) -> Link:
        """Return the link of so many members, `inner` in a host, as of one rack."""
        device, achieved = self.device, self.device.efficiency
        if members == 1:
            return Link(name="none", bytes_per_s=math.inf, hop_s=0.0)
        if self.torus and inner == members:
            return self._torus_link(mesh_shape, mesh_axes, members)
        inside = self._inside_bytes_per_s(inner)
        if inner == members:
            return Link(
                name="host",
                bytes_per_s=inside,
                port_bytes_per_s=self._inside_bytes_per_s(2),
                hop_s=achieved.hop_s,
            )
        # A ring through every host leaves it by one member's port; with as many rings
        # as members in a host, all their ports carry a share (NCCL's channels), as far
        # as the links inside bring them there.
        port = device.network_bytes_per_s * achieved.network
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

    link_of = renamed("Cluster.link_of", mesh_link)

    def _inside_bytes_per_s(self, members: int) -> float:
        """Return the rate of a group in one host; of two, that of one to the other."""
        device = self.device
        whole = device.link_bytes_per_s * device.efficiency.link
        if not device.meshed or members == 1:
            return whole
        return whole * min(1, (members - 1) / (device.domain_devices - 1))

    def _members_in_one_host(
        self, mesh_shape: Mapping[str, int], mesh_axes: Sequence[str]
    ) -> int:
        """Return the members of a group that lie in one host."""
        if self.hosts == 1:
            return math.prod(mesh_shape[axis] for axis in mesh_axes)
        return _members_within(self.devices_per_host, mesh_shape, mesh_axes)

    def _torus_link(
        self, mesh_shape: Mapping[str, int], mesh_axes: Sequence[str], members: int
    ) -> Link:
        """Return the rings along the dims of the torus that these mesh axes cover.

        A chip's links bring what a group of all its devices gathers once, for all of
        them; groups of fewer have a part of the links each.
        """
        device = self.device
        on_chip, spans = self._torus_spans(mesh_shape, mesh_axes)
        if on_chip == members:
            return Link(
                name="chip",
                bytes_per_s=device.chip_bytes_per_s * device.efficiency.link,
                hop_s=device.efficiency.hop_s,
            )
        if on_chip * math.prod(span.size for span in spans) != members:
            # The sizes share no factors: one line through all of them.
            on_chip, spans = 1, (Span(members, 1),)
        link_bytes_per_s = device.link_bytes_per_s * device.efficiency.link
        groups = device.chip_devices / on_chip
        return Link(
            name="torus",
            bytes_per_s=link_bytes_per_s * sum(span.links for span in spans) / groups,
            port_bytes_per_s=link_bytes_per_s / device.chip_devices,
            hop_s=device.efficiency.hop_s,
            spans=spans,
            scatters_whole=self._scatters_whole(members),
        )

    def _scatters_whole(self, members: int) -> bool:
        """True if XLA:TPU all-reduces where a program reduce-scatters.

        A rule from what the libtpu of jax 0.10.2 compiled (2026-11-21): true over all
        of a slice of three dims (v5p 2x2x2, 2x2x4, 4x4x4) and of a square (v5e, v6e
        4x4, 8x8); not over 2x2x1, 2x2, 2x4, 4x8, nor over part of a slice, nor on v7x,
        whose chips are two devices (2x2x1, 2x2x2, 4x4x4).
        """
        if self.device.chip_devices > 1:
            return False
        if self.hosts > 1 or members != self.devices_per_host:
            return False
        if len(self.torus) == 3:
            return min(self.torus) > 1
        return len(set(self.torus)) == 1 and self.torus[0] >= 4

    def _torus_spans(
        self, mesh_shape: Mapping[str, int], mesh_axes: Sequence[str]
    ) -> tuple[int, tuple[Span, ...]]:
        """Return the devices of a chip in a group of these mesh axes, and its spans.

        Devices of a chip are neighbours, innermost (`mesh_utils.create_device_mesh`).
        """
        left = [self.device.chip_devices, *self.torus]
        covered = [1] * len(left)
        for axis, size in reversed(list(mesh_shape.items())):
            for dim, room in enumerate(left):
                part = math.gcd(size, room)
                left[dim], size = room // part, size // part
                covered[dim] *= part if axis in mesh_axes else 1
        on_chip, *sizes = covered
        return on_chip, tuple(
            Span(size, 2 if size == whole and self._wraps(whole) else 1)
            for size, whole in zip(sizes, self.torus, strict=True)
            if size > 1
        )

    def _wraps(self, size: int) -> bool:
        """True if the ends of a dim of the slice are joined.

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


def _members_within(
    room: int, mesh_shape: Mapping[str, int], mesh_axes: Sequence[str]
) -> int:
    """Return the members of a group among `room` devices that are neighbours."""
    inner = 1
    for axis, size in reversed(list(mesh_shape.items())):
        inside = size if room % size == 0 else math.gcd(size, room)
        inner *= inside if axis in mesh_axes else 1
        room = room // size if inside == size else 1
    return inner
