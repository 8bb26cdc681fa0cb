"""An all-reduce in three parts: inside each host, across hosts, inside again.

For a backend that sends a sum of all devices around one ring of them, as XLA's CPU
collectives over gloo do: of P values 2 P (n - 1)/n then leave every host, d devices of
h hosts (n = d h) notwithstanding. Reduce-scattered inside first, 2 P (h - 1)/h do.

NCCL needs no such help: each of its rings runs through all GPUs of a host before it
leaves it, with as many rings as the host has ports (NCCL 2.20, src/graph/connect.cc).
Nor do TPUs of one slice, which have one kind of link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from meshpar.collectives import asked
from meshpar.layout import MESH_AXES
from meshpar.parallel.data import all_together


@dataclass(frozen=True)
class HostGroups:
    """Devices of a collective by their place in it.

    Args:
        inside: Those of each host.
        across: One of each host, the first ones together, the second ones and so on.
    """

    inside: tuple[tuple[int, ...], ...]
    across: tuple[tuple[int, ...], ...]


def host_groups(hosts: np.ndarray, mesh_axes: Sequence[str]) -> HostGroups | None:
    """The groups of a collective over some mesh axes, in that order, first slowest.

    None where it stays in a host, where each of its devices is in another, or where
    hosts hold different numbers of them or lie otherwise from group to group.

    Args:
        hosts: The host of each device, a dim for each of `MESH_AXES`.
        mesh_axes: Over which it goes.

    Example:
        >>> hosts = np.array([0, 0, 1, 1]).reshape(4, 1, 1, 1, 1, 1)
        >>> host_groups(hosts, ["data"]).across
        ((0, 2), (1, 3))
    """
    dims = [MESH_AXES.index(axis) for axis in mesh_axes]
    rows = np.moveaxis(hosts, dims, range(-len(dims), 0))
    members = int(np.prod([hosts.shape[dim] for dim in dims]))
    found = {_by_host(row) for row in rows.reshape(-1, members).tolist()}
    if len(found) != 1:
        return None
    (inside,) = found
    sizes = {len(group) for group in inside}
    if len(inside) == 1 or sizes == {1} or len(sizes) != 1:
        return None
    return HostGroups(inside, tuple(zip(*inside, strict=True)))


def sum_by_host(
    hosts: np.ndarray, arrays: list[jax.Array], mesh_axes: tuple[str, ...]
) -> list[jax.Array]:
    """Each array summed over mesh axes, by host where that sends less across.

    Args:
        hosts: As of `host_groups`.
        arrays: This device's.
        mesh_axes: Over which.
    """
    groups = host_groups(hosts, mesh_axes)
    if groups is None:
        return all_together(arrays, mesh_axes)
    summed: dict[int, jax.Array] = {}
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        places = [at for at, array in enumerate(arrays) if array.dtype == dtype]
        found = all_reduce([arrays[at] for at in places], mesh_axes, groups)
        summed.update(zip(places, found, strict=True))
    return [summed[at] for at in range(len(arrays))]


def all_reduce(
    arrays: Sequence[jax.Array], mesh_axes: Sequence[str], groups: HostGroups
) -> list[jax.Array]:
    """Each array summed over mesh axes, as `lax.psum` does it but for rounding.

    Of all values together, padded to a multiple of a host's devices: one reduce-scatter
    inside hosts, one all-reduce across them of a device's share, one all-gather inside.

    Args:
        arrays: This device's, of one dtype.
        mesh_axes: As `host_groups` had them.
        groups: From there.
    """
    axes = tuple(mesh_axes)
    values, restored = ravel_pytree(list(arrays))
    row = jnp.pad(values, (0, -values.size % len(groups.inside[0])))
    with asked("host_scatter"):
        own = lax.psum_scatter(row, axes, axis_index_groups=groups.inside, tiled=True)
    with asked("gradient_reduction"):
        own = lax.psum(own, axes, axis_index_groups=groups.across)
    with asked("host_gather"):
        row = lax.all_gather(own, axes, axis_index_groups=groups.inside, tiled=True)
    return restored(row[: values.size])


def _by_host(row: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Places in a row by the host that stands there, in order of the first ones."""
    places: dict[int, list[int]] = {}
    for place, host in enumerate(row):
        places.setdefault(host, []).append(place)
    return tuple(map(tuple, places.values()))
