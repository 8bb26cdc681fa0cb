"""A layout and devices become a `jax.sharding.Mesh`, in topology order."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshpar.errors import InputError
from meshpar.layout import MESH_AXES, Layout
from meshpar.topology import Topology

_ALL_AUTO = (AxisType.Auto,) * len(MESH_AXES)


class UnusedDevicesWarning(UserWarning):
    """A layout that leaves devices of the machine out."""


def make_mesh(
    layout: Layout | str,
    devices: Sequence[jax.Device] | None = None,
    *,
    topology: Topology | None = None,
) -> Mesh:
    """A mesh of all six axes, `tensor` innermost on the fastest link.

    TPUs follow the torus (`mesh_utils.create_device_mesh`); other devices are taken
    host by host in order of their ids. Every mesh axis is `Auto`.

    Args:
        layout: Sizes of the mesh axes, or a layout's text; a -1 absorbs what the
            devices leave.
        devices: Devices to use; JAX's by default, as many as the layout needs.
        topology: Hosts and links; read from the devices by default.

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
            "the topology of the devices that are used"
        )
    topology.warn_if_tensor_crosses_hosts(layout)
    shape = tuple(layout.mesh_shape.values())
    return Mesh(_arrange(devices, shape), MESH_AXES, axis_types=_ALL_AUTO)


def _checked(devices: Any) -> list[jax.Device]:
    if not isinstance(devices, Iterable):
        raise InputError(
            f"devices={devices!r}: give a list of JAX's devices, such as "
            "jax.devices()[:2]"
        )
    return list(devices)


def _first_devices(layout: Layout) -> list[jax.Device]:
    """JAX's devices, or the first of one process's where the layout needs fewer."""
    devices = jax.devices()
    sizes = [getattr(layout, mesh_axis) for mesh_axis in MESH_AXES]
    # Of several processes, those without a device in the mesh would have to stay out.
    if -1 in sizes or math.prod(sizes) >= len(devices) or jax.process_count() > 1:
        return devices
    warnings.warn(
        f"layout {str(layout)!r} needs {math.prod(sizes)} devices, but there are "
        f"{len(devices)}: the first {math.prod(sizes)} are used; give devices= to "
        "choose others",
        UnusedDevicesWarning,
        stacklevel=3,
    )
    return devices[: math.prod(sizes)]


def absent_mesh(layout: Layout | str) -> AbstractMesh:
    """A mesh of all six axes without devices: to lower a program, not to run it.

    Args:
        layout: Sizes of the mesh axes, or a layout's text.

    Raises:
        InputError: The layout cannot be read, or leaves a -1.

    Example:
        >>> absent_mesh("data=8,tensor=8").size
        64
    """
    sizes = tuple(Layout.of(layout).mesh_shape.values())
    return AbstractMesh(sizes, MESH_AXES, axis_types=_ALL_AUTO)


def use_mesh(mesh: Mesh | AbstractMesh) -> AbstractContextManager[Any]:
    """`with use_mesh(mesh):` sets the mesh for tracing, with or without devices."""
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return jax.set_mesh(mesh)


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Kind of its devices, `cpu`, `gpu` or `tpu`; `cpu` where it has none."""
    if isinstance(mesh, AbstractMesh):
        return "cpu"
    return mesh.devices.flat[0].platform


def _arrange(devices: list[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    if devices[0].platform == "tpu":
        return mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=True
        )
    in_order = sorted(devices, key=lambda device: (device.process_index, device.id))
    return np.array(in_order).reshape(shape)
