"""Orders of mesh axes over hosts, and which axes an order puts on a slow link.

Devices of a host are neighbours, so the innermost axes of the order are inside hosts.
A collective whose group spans hosts runs at the speed of the network, times the number
of the group's devices in one host, whose ports all carry a share (NCCL's channels).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshpar.errors import InputError, nearest
from meshpar.layout import MESH_AXES
from meshpar.machine.topology import Topology

Sent = Mapping[tuple[str, ...], float]
"""Mesh axes of collectives -> bytes that a device sends for them in a step."""

_GAIN = 0.95
"""An order is reported if its time is at most this part of the present one."""

_UNKNOWN = (9.0, 1.0)
"""Relative speeds of a host's link and the network if unknown, as for H100 hosts."""


@dataclass(frozen=True, kw_only=True)
class SlowAxis:
    """A mesh axis on a slower link than another order would give it.

    Args:
        mesh_axes: The mesh axis, or several that a collective spans.
        sent_bytes: Bytes that a device sends in a step.
        bytes_per_s: Speed of its present link; None if it is unknown.
        could_bytes_per_s: Speed of the link under `order`.
        order: The faster order, outermost first.
        kept_s: Time of all axes' traffic under `order`, as a part of the present one.
    """

    mesh_axes: tuple[str, ...]
    sent_bytes: float
    bytes_per_s: float | None
    could_bytes_per_s: float | None
    order: tuple[str, ...]
    kept_s: float

    def __str__(self) -> str:
        axes, order = "+".join(self.mesh_axes), ",".join(self.order)
        between, inside = "between hosts", "inside one"
        if self.bytes_per_s and self.could_bytes_per_s:
            between += f" at {self.bytes_per_s / 1e9:g} GB/s"
            inside = f"at {self.could_bytes_per_s / 1e9:g} GB/s"
        return (
            f"mesh axis '{axes}' sends {self.sent_bytes / 1e6:,.1f} MB a step {between}"
            f"; it could {inside}: in the order {order} (make_mesh(order=), "
            f"--mesh-order) all traffic takes {self.kept_s:.0%} of the time"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)


def full_order(order: Sequence[str] | str | None, sizes: Mapping[str, int]) -> tuple:
    """Complete an order of mesh axes: axes that it leaves out come first.

    Args:
        order: Mesh axes, outermost first, or their text (`stage,data,tensor`); None
            for `MESH_AXES`.
        sizes: Size of each mesh axis.

    Raises:
        InputError: An axis is unknown, repeated, or missing although its size is above
            1.

    Example:
        >>> full_order("stage,fsdp", {**dict.fromkeys(MESH_AXES, 1), "fsdp": 8})[-2:]
        ('stage', 'fsdp')
    """
    if order is None:
        return MESH_AXES
    names = tuple(order.split(",")) if isinstance(order, str) else tuple(order)
    for name in names:
        if name not in MESH_AXES:
            raise InputError(
                f"order: no mesh axis {name!r}; {nearest(name, MESH_AXES)}",
                key="mesh.unknown_axis",
            )
        if names.count(name) > 1:
            raise InputError(
                f"order {','.join(names)}: {name!r} is there twice",
                key="mesh.repeated_axis",
            )
    missing = [axis for axis in MESH_AXES if sizes[axis] > 1 and axis not in names]
    if missing:
        raise InputError(
            f"order {','.join(names)} leaves out {', '.join(map(repr, missing))} of "
            "more than one device; name all such mesh axes, outermost first",
            key="mesh.missing_axis",
        )
    return (*(axis for axis in MESH_AXES if axis not in names), *names)


def in_order(
    values: np.ndarray, sizes: Mapping[str, int], order: Sequence[str]
) -> np.ndarray:
    """Arrange values of devices on a mesh in an order of its axes.

    Args:
        values: A value for each device; neighbours go along the last axis of `order`.
        sizes: Size of each mesh axis.
        order: All mesh axes, outermost first.

    Returns:
        An array with a dim for each of `MESH_AXES`.
    """
    placed = values.reshape([sizes[axis] for axis in order])
    return placed.transpose([list(order).index(axis) for axis in MESH_AXES])


def slow_axes(
    topology: Topology,
    sizes: Mapping[str, int],
    sent: Sent,
    *,
    hosts: np.ndarray | None = None,
) -> tuple[SlowAxis, ...]:
    """Return the mesh axes that another order puts on a faster link, worst first.

    The result is empty if no order makes all traffic together faster.

    Args:
        topology: The hosts and their links.
        sizes: Size of each mesh axis.
        sent: Bytes that a device sends over mesh axes.
        hosts: The host of each device of the mesh; as `make_mesh` puts them by default.
    """
    row = np.arange(topology.num_devices) // topology.devices_per_host
    hosts = in_order(row, sizes, MESH_AXES) if hosts is None else hosts
    large = [axis for axis in MESH_AXES if sizes[axis] > 1]
    sent = {
        tuple(axis for axis in large if axis in axes): number
        for axes, number in sent.items()
    }
    sent = {axes: number for axes, number in sent.items() if axes and number}
    if topology.hosts == 1 or not sent:
        return ()
    now = _speeds(topology, hosts, sent)
    best: tuple[str, ...] = MESH_AXES
    speeds, best_s = now, math.inf
    small = [axis for axis in MESH_AXES if sizes[axis] == 1]
    for inner in itertools.permutations(large):  # the first is `MESH_AXES`
        order = (*small, *inner)
        candidate = _speeds(topology, in_order(row, sizes, order), sent)
        if (total_s := _seconds(candidate, sent)) < best_s:
            best, speeds, best_s = order, candidate, total_s
    kept = best_s / _seconds(now, sent)
    if kept > _GAIN:
        return ()
    known = topology.host_bytes_per_s and topology.network_bytes_per_s
    slow = [
        SlowAxis(
            mesh_axes=axes,
            sent_bytes=sent[axes],
            bytes_per_s=now[axes] if known else None,
            could_bytes_per_s=speeds[axes] if known else None,
            order=tuple(axis for axis in best if sizes[axis] > 1),
            kept_s=kept,
        )
        for axes in sent
        if speeds[axes] > now[axes]
    ]

    def saved_s(axis: SlowAxis) -> float:
        axes = axis.mesh_axes
        return axis.sent_bytes * (1 / now[axes] - 1 / speeds[axes])

    return tuple(sorted(slow, key=saved_s, reverse=True))


def _seconds(speeds: Mapping[tuple[str, ...], float], sent: Sent) -> float:
    return sum(number / speeds[axes] for axes, number in sent.items())


def _speeds(
    topology: Topology, hosts: np.ndarray, sent: Sent
) -> dict[tuple[str, ...], float]:
    """Return the bytes/s of each device in collectives over these mesh axes."""
    host, network = topology.host_bytes_per_s, topology.network_bytes_per_s
    inside, between = (host, network) if host and network else _UNKNOWN
    speeds = {}
    for axes in sent:
        dims = [MESH_AXES.index(axis) for axis in axes]
        groups = np.moveaxis(hosts, dims, range(-len(dims), 0))
        groups = groups.reshape(-1, math.prod(groups.shape[-len(dims) :]))
        most_hosts = max(len(set(group)) for group in groups.tolist())
        per_host = groups.shape[1] / most_hosts
        speeds[axes] = inside if most_hosts == 1 else min(between * per_host, inside)
    return speeds
