"""Make a `jax.sharding.Mesh` for a layout: its devices, and the order of its axes.

Devices of a host are neighbours, so the innermost axes of the order are inside hosts.
A collective whose group spans hosts runs at the speed of the network, times the number
of the group's devices in one host, whose ports all carry a share (NCCL's channels).
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshpar.errors import InputError
from meshpar.hardware.platforms import platform_named
from meshpar.layout import MESH_AXES, Layout
from meshpar.layout.mesh_order import full_order as full_order
from meshpar.machine.topology import Topology, device_domains

_ALL_AUTO = (AxisType.Auto,) * len(MESH_AXES)

Sent = Mapping[tuple[str, ...], float]
"""Mesh axes of collectives -> bytes that a device sends for them in a step."""

Groups = tuple[tuple[str, ...], ...]
"""Mesh axes of collectives."""

Speeds = dict[tuple[str, ...], float]
"""Mesh axes of collectives -> bytes/s of each device."""

_GAIN = 0.95
"""An order is reported if its time is at most this part of the present one."""

_UNKNOWN = (9.0, 1.0)
"""Relative speeds of a host's link and the network if unknown, as for H100 hosts."""


class UnusedDevicesWarning(UserWarning):
    """Warning that a layout leaves devices of the machine unused."""


def make_mesh(
    layout: Layout | str,
    devices: Sequence[jax.Device] | None = None,
    *,
    topology: Topology | None = None,
    order: Sequence[str] | str | None = None,
) -> Mesh:
    """Return a mesh of all six axes, with `tensor` innermost on the fastest link.

    TPUs follow the torus of each slice, slice by slice
    (`mesh_utils.create_hybrid_device_mesh`); GPUs are ordered by NVLink domain, and
    other devices host by host, by id. Every mesh axis is `Auto`.

    Args:
        layout: Sizes of the mesh axes, or a layout's text; a -1 absorbs what the
            devices leave.
        devices: Devices to use; JAX's by default, as many as the layout needs.
        topology: Hosts and links; read from the devices by default.
        order: Mesh axes, outermost first, the last on neighbouring devices; `MESH_AXES`
            by default (`slow_axes` finds a faster one).

    Raises:
        InputError: The layout needs another number of devices, or the topology
            describes another number.

    Warns:
        TopologyWarning: `tensor` crosses hosts.
        UnusedDevicesWarning: `devices` is absent, and not all of JAX's are needed.
    """
    layout = Layout.of(layout)
    devices = _first_devices(layout) if devices is None else _checked(devices)
    layout = layout.resolve(len(devices))
    topology = topology or Topology.from_devices(devices)
    if topology.num_devices != len(devices):
        raise InputError(
            f"the topology has {topology.hosts} hosts x {topology.devices_per_host} = "
            f"{topology.num_devices} devices, but there are {len(devices)}; declare "
            "the topology of the devices that are used",
            key="mesh.topology_mismatch",
        )
    sizes = layout.mesh_shape
    axes = full_order(order, sizes)
    topology.warn_if_tensor_crosses_hosts(layout, axes)
    arranged = _arrange(devices, tuple(sizes[axis] for axis in axes))
    placed = in_order(arranged, sizes, axes)
    return Mesh(placed, MESH_AXES, axis_types=_ALL_AUTO)


def mesh_hosts(mesh: Mesh) -> tuple[int, ...]:
    """Return the host, or fast-link domain, of each device of a mesh, row by row."""
    return tuple(device_domains(list(mesh.devices.flat)))


def _checked(devices: Any) -> list[jax.Device]:
    if not isinstance(devices, Iterable):
        raise InputError(
            f"devices={devices!r}: give a list of JAX's devices, such as "
            "jax.devices()[:2]",
            key="mesh.not_devices",
        )
    return list(devices)


def _first_devices(layout: Layout) -> list[jax.Device]:
    """Return JAX's devices, or the first of a single process if fewer are needed."""
    devices = jax.devices()
    # With several processes, each needs a device in the mesh.
    if layout.is_open or jax.process_count() > 1:
        return devices
    needed = layout.num_devices
    if needed >= len(devices):
        return devices
    warnings.warn(
        f"layout {str(layout)!r} needs {needed} devices, but there are "
        f"{len(devices)}: the first {needed} are used; give devices= to choose others",
        UnusedDevicesWarning,
        stacklevel=3,
    )
    return devices[:needed]


def absent_mesh(layout: Layout | str) -> AbstractMesh:
    """Return a mesh of all six axes without devices, to lower a program.

    Args:
        layout: Sizes of the mesh axes, or a layout's text.

    Raises:
        InputError: The layout cannot be read, or contains a -1.

    Example:
        >>> absent_mesh("data=8,tensor=8").size
        64
    """
    sizes = tuple(Layout.of(layout).mesh_shape.values())
    return AbstractMesh(sizes, MESH_AXES, axis_types=_ALL_AUTO)


def use_mesh(mesh: Mesh | AbstractMesh) -> AbstractContextManager[Any]:
    """Set the mesh for tracing in a `with` statement, with or without devices."""
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return jax.set_mesh(mesh)


def mesh_platform(mesh: Mesh | AbstractMesh) -> str:
    """Return the platform of a mesh's devices; `cpu` if it has none."""
    if isinstance(mesh, AbstractMesh):
        return "cpu"
    return mesh.devices.flat[0].platform


def device_kinds(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of kinds of devices of a mesh; 1 if it has none."""
    if isinstance(mesh, AbstractMesh):
        return 1
    return len({device.device_kind for device in mesh.devices.flat})


def _arrange(devices: list[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of the devices, with neighbours along its last dims."""
    if platform_named(devices[0].platform).has_torus:
        return _along_torus(devices, shape)
    placed = sorted(
        zip(device_domains(devices), devices, strict=True),
        key=lambda pair: (pair[0], pair[1].process_index, pair[1].id),
    )
    neighbours = np.empty(len(devices), object)
    neighbours[:] = [device for _, device in placed]
    return neighbours.reshape(shape)


def _along_torus(devices: list[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    slices = len(set(device_domains(devices)))
    across, inside = _outermost(shape, slices)
    if slices == 1 or math.prod(across) != slices:
        return mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=True
        )
    return mesh_utils.create_hybrid_device_mesh(
        inside, across, devices, allow_split_physical_axes=True
    )


def _outermost(
    shape: tuple[int, ...], number: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split a shape into factors of product `number`, from the left, and the rest.

    Example:
        >>> _outermost((2, 4, 1, 8), 4)
        ((2, 2, 1, 1), (1, 2, 1, 8))
    """
    taken = []
    for size in shape:
        taken.append(math.gcd(size, number))
        number //= taken[-1]
    rest = (size // factor for size, factor in zip(shape, taken, strict=True))
    return tuple(taken), tuple(rest)


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
        place: Where the present link leads, in words.
    """

    mesh_axes: tuple[str, ...]
    sent_bytes: float
    bytes_per_s: float | None
    could_bytes_per_s: float | None
    order: tuple[str, ...]
    kept_s: float
    place: str = "between hosts"

    def __str__(self) -> str:
        axes, order = "+".join(self.mesh_axes), ",".join(self.order)
        between, inside = self.place, "inside one"
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


def slow_mesh_axes(mesh: Mesh, sent: Sent) -> tuple[SlowAxis, ...]:
    """Return the axes of a mesh that another order puts on a faster link, worst first.

    Args:
        mesh: A mesh with devices.
        sent: Mesh axes of collectives -> bytes that a device sends for them in a step.
    """
    devices = list(mesh.devices.flat)
    if len(set(Counter(device_domains(devices)).values())) != 1:
        return ()  # No order suits hosts of different sizes.
    return slow_axes(
        Topology.from_devices(devices),
        dict(mesh.shape),
        sent,
        hosts=np.array(mesh_hosts(mesh)).reshape(mesh.devices.shape),
    )


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
    if topology.hosts == 1:
        return ()

    def speeds(order: Sequence[str], groups: Groups) -> Speeds:
        return _speeds(topology, in_order(row, sizes, order), groups)

    known = topology.host_bytes_per_s and topology.network_bytes_per_s
    found = slower_axes(
        sizes,
        sent,
        speeds,
        now=None if hosts is None else lambda groups: _speeds(topology, hosts, groups),
    )
    if known:
        return found
    return tuple(
        replace(one, bytes_per_s=None, could_bytes_per_s=None) for one in found
    )


def slower_axes(
    sizes: Mapping[str, int],
    sent: Sent,
    speeds: Callable[[Sequence[str], Groups], Speeds],
    *,
    now: Callable[[Groups], Speeds] | None = None,
    place: str = "between hosts",
) -> tuple[SlowAxis, ...]:
    """Return the mesh axes that another order puts on a faster link, worst first.

    Args:
        sizes: Size of each mesh axis.
        sent: Bytes that a device sends over mesh axes.
        speeds: Function that returns the bytes/s of groups of mesh axes in an order.
        now: The same as devices lie; `MESH_AXES` when absent.
        place: Where a slow link leads, in words.
    """
    large = [axis for axis in MESH_AXES if sizes[axis] > 1]
    sent = {
        tuple(axis for axis in large if axis in axes): number
        for axes, number in sent.items()
    }
    sent = {axes: number for axes, number in sent.items() if axes and number}
    if not sent:
        return ()
    present = now(tuple(sent)) if now else speeds(MESH_AXES, tuple(sent))
    small = [axis for axis in MESH_AXES if sizes[axis] == 1]
    # The first is `MESH_AXES`, which no equal one replaces.
    orders = [(*small, *inner) for inner in itertools.permutations(large)]
    rates = [speeds(order, tuple(sent)) for order in orders]
    best = min(range(len(orders)), key=lambda at: _seconds(rates[at], sent))
    kept = _seconds(rates[best], sent) / _seconds(present, sent)
    if kept > _GAIN:
        return ()

    def saved_s(axis: SlowAxis) -> float:
        axes = axis.mesh_axes
        return axis.sent_bytes * (1 / present[axes] - 1 / rates[best][axes])

    slow = [
        SlowAxis(
            mesh_axes=axes,
            sent_bytes=sent[axes],
            bytes_per_s=present[axes],
            could_bytes_per_s=rates[best][axes],
            order=tuple(axis for axis in orders[best] if sizes[axis] > 1),
            kept_s=kept,
            place=place,
        )
        for axes in sent
        if rates[best][axes] > present[axes]
    ]
    return tuple(sorted(slow, key=saved_s, reverse=True))


def _seconds(speeds: Mapping[tuple[str, ...], float], sent: Sent) -> float:
    return sum(number / speeds[axes] for axes, number in sent.items())


def _speeds(topology: Topology, hosts: np.ndarray, sent: Groups) -> Speeds:
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
