"""Refuse a cache of keys and values that is larger than a device's memory."""

from __future__ import annotations

import os

import jax
from jax.sharding import AbstractMesh, Mesh

from meshpar.errors import InputError
from meshpar.generation.cache_plan import CachePlan

_PAGE_NUMBER_BYTES = 4


def check_memory(plan: CachePlan, mesh: Mesh | AbstractMesh) -> None:
    """Refuse a cache that is larger than all memory of a device.

    A smaller one may not fit either, beside what else is there: JAX says so.

    Args:
        plan: Sizes of the cache.
        mesh: The devices; of an abstract mesh nothing is known.

    Raises:
        InputError: It is larger; names both, in bytes.
    """
    here = [] if isinstance(mesh, AbstractMesh) else mesh.local_devices
    if not here:
        return
    table_bytes = plan.slots * plan.table_pages * _PAGE_NUMBER_BYTES
    needed, there = plan.bytes_per_device() + table_bytes, _memory_bytes(here[0])
    if needed > there:
        raise InputError(
            f"{plan.slots} examples at once of up to {plan.max_seq} tokens need a "
            f"cache of {needed:,} bytes on a device that has {there:,}; give fewer "
            "tokens, or fewer slots",
            key="generation.cache_too_large",
        )


def _memory_bytes(device: jax.Device) -> int:
    """Return the bytes of a device; of a virtual CPU device its share of the host's."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host_bytes // len(device.client.local_devices())
