"""What must be sent to lay parameters out otherwise: the parts that devices lack."""

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
"""Of each dim, the places that a device has."""

ELSEWHERE = "other devices"
"""In a mesh axis' place, of what comes from devices outside the new mesh's."""


@dataclass(frozen=True, kw_only=True)
class MovedBytes:
    """Bytes that devices receive, none of which they had.

    Args:
        total: Of all devices.
        by_axis: The outermost mesh axis of the old layout that each byte crosses, from
            the nearest device that has it.
        by_link: `host` between devices of one process, `network` between processes.
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
    """What laying one array out otherwise sends at least.

    Args:
        shape: Of the array as `target` splits it.
        itemsize: Bytes of a value.
        source: How it lies.
        target: How it is to lie.
        places: The layer at each place of the leading dim, before and after; None where
            both are alike.
    """
    before, after = places or (range(shape[0] if shape else 0),) * 2
    first = (len(before), *shape[1:]) if shape else ()
    holders = _holders(source, first)
    coordinates = _coordinates(source)
    found = NOTHING
    for device, box in _boxes(target, shape):
        own_layers = {after[at] for at in box[0]} - {-1} if box else set()
        for there, devices in holders.items():
            values = _common(box, there, own_layers, before)
            if device in devices or not values:
                continue
            axis, holder = _nearest(device, devices, coordinates)
            link = "host" if holder.process_index == device.process_index else "network"
            size = values * itemsize
            found += MovedBytes(total=size, by_axis={axis: size}, by_link={link: size})
    return found


def _boxes(
    sharding: NamedSharding, shape: Sequence[int]
) -> Iterator[tuple[jax.Device, Box]]:
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        parts = zip(index or (), shape, strict=True)
        yield device, tuple(range(*part.indices(size)) for part, size in parts)


def _holders(
    sharding: NamedSharding, shape: Sequence[int]
) -> dict[Box, list[jax.Device]]:
    found: dict[Box, list[jax.Device]] = {}
    for device, box in _boxes(sharding, shape):
        found.setdefault(box, []).append(device)
    return found


def _common(box: Box, there: Box, layers: set[int], before: Sequence[int]) -> int:
    if not box:
        return 1
    here = len(layers & {before[at] for at in there[0]})
    others = (
        max(0, min(one.stop, other.stop) - max(one.start, other.start))
        for one, other in zip(box[1:], there[1:], strict=True)
    )
    return here * math.prod(others)


def _coordinates(sharding: NamedSharding) -> dict[jax.Device, tuple[int, ...]]:
    devices: Any = sharding.mesh.devices
    return {device: at for at, device in np.ndenumerate(devices)}


def _nearest(
    device: jax.Device,
    holders: Sequence[jax.Device],
    coordinates: dict[jax.Device, tuple[int, ...]],
) -> tuple[str, jax.Device]:
    """The outermost mesh axis that a byte crosses, and the device that it comes from.

    Of several devices that have it, the one that differs in inner axes only.
    """
    if device not in coordinates:
        return ELSEWHERE, holders[0]
    own = coordinates[device]

    def outermost(holder: jax.Device) -> int:
        pairs = zip(own, coordinates[holder], strict=True)
        return next(at for at, (one, other) in enumerate(pairs) if one != other)

    holder = max(holders, key=outermost)
    return MESH_AXES[outermost(holder)], holder
