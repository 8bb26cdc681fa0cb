"""Which devices take part in a collective together, and which mesh axes those are."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

Groups = tuple[tuple[int, ...], ...]
"""Devices by their position in the mesh, row by row."""

_NUMBERS = r"[\d, ]*"
_LISTED = re.compile(rf"replica_groups=\{{((?:\{{{_NUMBERS}\}},?\s*)*)\}}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_ORDER = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
_MESH = re.compile(rf"replica_groups=@?mesh\[([^\]]*)\]{_ORDER} \{{([^}}]*)\}}")
_PAIRS = re.compile(rf"source_target_pairs=\{{((?:\{{{_NUMBERS}\}},?\s*)*)\}}")


def parse_groups(attributes: str, num_devices: int) -> Groups | None:
    """The groups of a collective; None if its attributes have none.

    All four forms: `{{0,1},{2,3}}`, `{}` (everyone), `[2,2]<=[4]` with or without a
    transpose, and `mesh['a'=2,'b'=2] {'b'}`, whose devices may be in another order:
    `mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}`.

    Raises:
        ValueError: A list that is cut short, sizes that do not agree, or a device
            that is not there.
    """
    if "replica_groups=" not in attributes:
        return None
    for pattern, read in ((_MESH, _mesh), (_IOTA, _iota), (_LISTED, _listed)):
        match = pattern.search(attributes)
        if match:
            groups = read(*match.groups()) or (tuple(range(num_devices)),)
            _check_devices(itertools.chain(*groups), num_devices)
            return groups
    raise ValueError("replica_groups cannot be read")


def parse_pairs(attributes: str, num_devices: int) -> tuple[tuple[int, int], ...]:
    """(source, target) of every transfer of a collective-permute.

    Raises:
        ValueError: There are none, or one is no pair.
    """
    match = _PAIRS.search(attributes)
    if not match:
        raise ValueError("source_target_pairs cannot be read")
    pairs = _listed(match[1])
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("a source_target_pair does not have two devices")
    _check_devices(itertools.chain(*pairs), num_devices)
    return tuple((source, target) for source, target in pairs)


def mesh_axes_of_groups(
    groups: Groups, mesh_shape: Mapping[str, int]
) -> tuple[str, ...] | None:
    """The mesh axes whose devices are grouped; None if no product of axes fits.

    Axes of size 1 are never named; groups of one device are ().

    Example:
        >>> mesh_axes_of_groups(((0, 1), (2, 3)), {"data": 2, "tensor": 2})
        ('tensor',)
        >>> mesh_axes_of_groups(((0, 3), (1, 2)), {"data": 2, "tensor": 2}) is None
        True
    """
    found = {frozenset(group) for group in groups}
    sizes = list(mesh_shape.values())
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    if len(set(itertools.chain(*groups))) != ids.size:
        return None
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    names = tuple(mesh_shape)
    for count in range(len(dims) + 1):
        for chosen in itertools.combinations(dims, count):
            size = math.prod(sizes[dim] for dim in chosen)
            if {len(group) for group in groups} != {size}:
                continue
            rows = np.moveaxis(ids, chosen, range(-count, 0)).reshape(-1, size)
            if {frozenset(row) for row in rows.tolist()} == found:
                return tuple(names[dim] for dim in chosen)
    return None


def mesh_axes_of_pairs(
    pairs: tuple[tuple[int, int], ...], mesh_shape: Mapping[str, int]
) -> tuple[str, ...]:
    """The mesh axes along which a collective-permute moves."""
    sizes = tuple(mesh_shape.values())
    if not pairs:
        return ()
    coordinates = np.unravel_index(np.array(pairs), sizes)
    return tuple(
        name
        for name, along in zip(mesh_shape, coordinates, strict=True)
        if (along[:, 0] != along[:, 1]).any()
    )


def _listed(text: str) -> Groups:
    return tuple(map(_numbers, re.findall(r"\{([^{}]*)\}", text)))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _ids(shape: str, order: str | None) -> np.ndarray:
    """Devices in an array of that shape, its dims then in another order."""
    sizes = _numbers(shape)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_numbers(order)) if order else ids


def _iota(shape: str, source: str, order: str | None) -> Groups:
    ids, rows = _ids(source, order), _numbers(shape)
    if math.prod(rows) != ids.size:
        raise ValueError(f"groups [{shape}] of the {ids.size} devices [{source}]")
    return tuple(tuple(row) for row in ids.reshape(rows[0], -1).tolist())


def _mesh(
    sizes_text: str, shape: str | None, order: str | None, axes_text: str
) -> Groups:
    sizes = {
        name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes_text)
    }
    names = re.findall(r"'([^']+)'", axes_text)
    unknown = [name for name in names if name not in sizes]
    if unknown or not sizes:
        raise ValueError(f"no mesh axis {unknown} in [{sizes_text}]")
    num_devices = math.prod(sizes.values())
    ids = _ids(shape or str(num_devices), order).reshape(tuple(sizes.values()))
    dims = [list(sizes).index(name) for name in names]
    moved = np.moveaxis(ids, dims, range(-len(dims), 0))
    size = math.prod(sizes[name] for name in names)
    return tuple(tuple(row) for row in moved.reshape(-1, size).tolist())


def _check_devices(devices: itertools.chain, num_devices: int) -> None:
    for device in devices:
        if not 0 <= device < num_devices:
            raise ValueError(f"device {device} of a program for {num_devices} devices")
