"""Make a `jax.sharding.Mesh` for a layout, with devices in topology order."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshpar.errors import InputError
from meshpar.hardware.platforms import platform_named
from meshpar.layout import MESH_AXES, Layout
from meshpar.machine.mesh_order import Sent, SlowAxis, full_order, in_order, slow_axes
from meshpar.machine.topology import Topology, device_domains

_ALL_AUTO = (AxisType.Auto,) * len(MESH_AXES)


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
            by default (`machine.mesh_order` finds a faster one).

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
