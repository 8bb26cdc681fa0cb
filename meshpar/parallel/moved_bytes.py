"""Bytes that a move of an array to another sharding sends, by mesh axis and link."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshpar.layout import MESH_AXES

Box = tuple[range, ...]
"""The indices of each dim that a device holds."""

ELSEWHERE = "other devices"
"""Used in place of a mesh axis for bytes from devices outside the mesh."""


@dataclass(frozen=True, kw_only=True)
class MovedBytes:
    """Bytes that devices receive, without those that they already hold.

    Args:
        total: Bytes of all devices.
        by_axis: Bytes by the outermost mesh axis of the old layout that they cross,
            from the nearest device that holds them.
        by_link: Bytes by link: `host` inside a process, `network` between processes.
    """

    total: int
    by_axis: dict[str, int]
    by_link: dict[str, int]

    def __add__(self, other: MovedBytes) -> MovedBytes:
        return MovedBytes(
            total=self.total + other.total,
            by_axis=dict(Counter(self.by_axis) + Counter(other.by_axis)),
            by_link=dict(Counter(self.by_link) + Counter(other.by_link)),
        )


NOTHING = MovedBytes(total=0, by_axis={}, by_link={})


def moved_bytes(
    shape: Sequence[int],
    itemsize: int,
    source: NamedSharding,
    target: NamedSharding,
    places: tuple[Sequence[int], Sequence[int]] | None = None,
) -> MovedBytes:
    """Return the least bytes that a move of one array to another sharding sends.

    Args:
        shape: Shape of the array after the move.
        itemsize: Bytes of a value.
        source: Sharding before the move.
        target: Sharding after the move.
        places: The layer at each place of the leading dim, before and after; None if
            both are equal.
    """
    before, after = places or (range(shape[0] if shape else 0),) * 2
    first = (len(before), *shape[1:]) if shape else ()
    holders: dict[Box, list[jax.Device]] = {}
    for device, box in _boxes(source, first):
        holders.setdefault(box, []).append(device)
    devices: Any = source.mesh.devices
    coordinates = {device: at for at, device in np.ndenumerate(devices)}
    total = NOTHING
    for device, box in _boxes(target, shape):
        own_layers = {after[at] for at in box[0]} - {-1} if box else set()
        for held, owners in holders.items():
            values = _common(box, held, own_layers, before)
            if device in owners or not values:
                continue
            axis, holder = _nearest(device, owners, coordinates)
            link = "host" if holder.process_index == device.process_index else "network"
            size = values * itemsize
            total += MovedBytes(total=size, by_axis={axis: size}, by_link={link: size})
    return total


def _boxes(
    sharding: NamedSharding, shape: Sequence[int]
) -> Iterator[tuple[jax.Device, Box]]:
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        parts = zip(index or (), shape, strict=True)
        yield device, tuple(range(*part.indices(size)) for part, size in parts)


def _common(box: Box, held: Box, layers: set[int], before: Sequence[int]) -> int:
    """Return the number of values of `box` with these layers that are in `held`."""
    if not box:
        return 1
    num_layers = len(layers & {before[at] for at in held[0]})
    sizes = (
        max(0, min(part.stop, other.stop) - max(part.start, other.start))
        for part, other in zip(box[1:], held[1:], strict=True)
    )
    return num_layers * math.prod(sizes)


def _nearest(
    device: jax.Device,
    holders: Sequence[jax.Device],
    coordinates: dict[jax.Device, tuple[int, ...]],
) -> tuple[str, jax.Device]:
    """Return the outermost mesh axis that a byte crosses, and the device that sends it.

    Of several devices that hold the byte, the one that differs in inner axes only.
    """
    if device not in coordinates:
        return ELSEWHERE, holders[0]
    own = coordinates[device]

    def outermost(holder: jax.Device) -> int:
        pairs = zip(own, coordinates[holder], strict=True)
        return next(at for at, (mine, other) in enumerate(pairs) if mine != other)

    holder = max(holders, key=outermost)
    return MESH_AXES[outermost(holder)], holder
