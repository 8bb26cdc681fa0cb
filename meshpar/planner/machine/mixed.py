"""Mixed hardware: clusters of several kinds of devices, and how a mesh lies over them.

Devices of a kind are neighbours, so one mesh axis crosses from kind to kind: the
outermost. A stage may have fewer blocks on slow devices, and a part of `data` fewer
microbatches; parts of `fsdp` are all alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from meshpar.errors import InputError
from meshpar.hardware.device import Device
from meshpar.planner.machine.cluster import Cluster

CROSSING_AXES = ("stage", "data", "fsdp")
"""Mesh axes that may cross from one kind of device to the next, the first to be tried
first; over the others a block waits for the network."""

MOST_KINDS = 3
"""Most kinds of devices of one plan: all shares of the blocks are tried."""


def joined(*parts: Cluster) -> Cluster:
    """Return the clusters as one, joined by the slowest of their networks.

    Its device is the one with the slowest matmuls, with no more memory, and no faster
    links, than any other has.

    Raises:
        InputError: Devices that no program has together.
    """
    devices = [part.device for part in parts]
    _check_kinds(devices)
    if len(parts) > MOST_KINDS:
        raise InputError(
            f"{len(parts)} kinds of devices: at most {MOST_KINDS} are planned "
            "together; leave some out",
            key="hardware.too_many_kinds",
        )
    slowest = min(devices, key=matmul_flops)
    fullest = min(devices, key=lambda device: device.usable_bytes)
    efficiency: dict[str, Any] = {
        name: max(getattr(one.efficiency, name) for one in devices)
        for name in ("hop_s", "network_hop_s", "spread")
    }
    rates: dict[str, Any] = {
        f"{part}_bytes_per_s": min(
            getattr(one, f"{part}_bytes_per_s") * getattr(one.efficiency, part)
            for one in devices
        )
        / getattr(slowest.efficiency, part)
        for part in ("memory", "link", "network", "host")
    }
    device = replace(
        slowest,
        name="+".join(dict.fromkeys(one.name for one in devices)),
        memory_bytes=fullest.memory_bytes,
        reserve=fullest.reserve,
        efficiency=replace(slowest.efficiency, **efficiency),
        rack_devices=_common_rack(parts),
        oversubscription=max(one.oversubscription for one in devices),
        rack_hop_s=max(one.rack_hop_s for one in devices),
        shares_host_link=any(one.shares_host_link for one in devices),
        taken_from=next(filter(None, (one.taken_from for one in devices)), ""),
        **rates,
    )
    each = math.gcd(*(part.devices_per_host for part in parts))
    total = sum(part.num_devices for part in parts)
    return Cluster(
        device=device, hosts=total // each, devices_per_host=each, parts=parts
    )


def _common_rack(parts: Sequence[Cluster]) -> int:
    """Return the devices of a rack that every kind fills; 0 if none has racks."""
    return math.gcd(*(part.device.rack_devices for part in parts))


def matmul_flops(device: Device) -> float:
    """Return the FLOP/s that a device's matmuls achieve: its speed, in short."""
    return device.peak_flops["bf16"] * device.efficiency.matmul


def _check_kinds(devices: list[Device]) -> None:
    platforms = dict.fromkeys(device.platform for device in devices)
    names = " + ".join(device.name for device in devices)
    if len(platforms) > 1:
        raise InputError(
            f"--hardware {names}: XLA compiles a program for one platform, and these "
            f"are {' and '.join(platforms)}; plan them one by one",
            key="hardware.mixed_platforms",
        )
    if len({device.fused_attention for device in devices}) > 1:
        raise InputError(
            f"--hardware {names}: XLA compiles a program for one vendor's GPUs, whose "
            "collectives are NCCL's or RCCL's; plan them one by one",
            key="hardware.mixed_vendors",
        )
    if any(device.torus_dims for device in devices):
        raise InputError(
            f"--hardware {names}: the slices of a TPU program are of one kind; plan "
            "them one by one, or give --hosts for several slices",
            key="hardware.mixed_slices",
        )


def check_one_kind(cluster: Cluster, what: str) -> None:
    """Refuse a cluster of several kinds of devices where only one kind is planned.

    Args:
        cluster: The cluster.
        what: What is planned for one kind only, with a verb: `--curve halves`.
    """
    if cluster.parts:
        raise InputError(
            f"{what} devices of one kind, not {cluster.text}; name one of them",
            key="hardware.mixed",
        )


def crossing_axis(cluster: Cluster, mesh_shape: Mapping[str, int]) -> str | None:
    """Return the mesh axis that crosses from one kind of device to the next.

    None if no axis puts whole shares of the mesh on every kind.

    Example:
        >>> from meshpar.planner.machine.clusters import cluster_of
        >>> crossing_axis(cluster_of("h100:32+a100:16"), {"data": 16, "stage": 3})
        'stage'
    """
    total = cluster.num_devices
    for axis in CROSSING_AXES:
        size = mesh_shape.get(axis, 1)
        if all(part.num_devices * size % total == 0 for part in cluster.parts):
            return axis
    return None


def crossing_first(
    cluster: Cluster, mesh_shape: Mapping[str, int]
) -> tuple[str | None, dict[str, int]]:
    """Return the crossing axis, and the mesh shape with that axis outermost."""
    axis = crossing_axis(cluster, mesh_shape)
    first = {} if axis is None else {axis: mesh_shape[axis]}
    return axis, {**first, **mesh_shape}


def crossing_shares(cluster: Cluster, size: int) -> tuple[range, ...]:
    """Return the places along the crossing axis, of `size`, that each part has."""
    total = cluster.num_devices
    counts = [part.num_devices * size // total for part in cluster.parts]
    ends = list(accumulate(counts))
    return tuple(range(end - n, end) for n, end in zip(counts, ends, strict=True))
