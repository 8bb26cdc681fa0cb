"""Check that all processes are about to run the same program, before any of them does.

Each process keeps its own record of slots and pages. The records agree if all processes
were given the same requests between the same steps; a process that was not would wait
in another collective than the rest, for ever. Each process cuts its own copy of the
parameters: if they differ, no device would notice.
"""

from __future__ import annotations

import zlib
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.errors import InputError


def digest(before: int, *values: Any) -> int:
    """Return a 32-bit checksum of an earlier checksum and plain values.

    Example:
        >>> digest(0, (1, 2)) == digest(0, (1, 2)), digest(0, (1, 2)) == digest(1, 3)
        (True, False)
    """
    return zlib.crc32(repr(values).encode(), before)


_SAMPLED = 1024


def sample(tree: Any) -> int:
    """Return a checksum of up to 1,024 values of each array in this process's memory.

    Skips files, of which each process reads its parts, and arrays of several processes.

    Example:
        >>> one, other = np.arange(4000.0), np.arange(1.0, 4001.0)
        >>> sample([one]) == sample([one.copy()]), sample([one]) == sample([other])
        (True, False)
    """
    known = 0
    for array in jax.tree.leaves(tree):
        on_devices = isinstance(array, jax.Array)
        if on_devices and not array.is_fully_addressable:
            continue
        if not on_devices and not isinstance(array, np.ndarray):
            continue
        flat = np.arange(0, array.size, max(1, -(-array.size // _SAMPLED)))
        values = array[np.unravel_index(flat, array.shape)] if array.ndim else array
        known = zlib.crc32(np.asarray(values).tobytes(), known)
    return known


def check_alike(mesh: Mesh, tree: Any) -> None:
    """Check by a sample that all processes have the same whole arrays.

    Raises:
        InputError: They differ; raised by all.
    """
    agreement = Agreement(mesh)
    if agreement.is_shared:
        agreement.check(
            sample(tree), _OTHER_VALUES, key="generation.differing_parameters"
        )


_OTHER_REQUESTS = (
    "is to go on with other requests than process {}: submit the same ones, in the "
    "same order and between the same steps, on every process, with the same tokenizer"
)
_OTHER_VALUES = (
    "gives other parameters than process {}, and each cuts its devices' part of its "
    "own; load the same weights on every process, or draw them from one seed"
)


class Agreement:
    """Compare checksums over the processes of a mesh.

    Args:
        mesh: The devices.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @cached_property
    def is_shared(self) -> bool:
        """True if several processes have devices of the mesh."""
        return len(set(self._processes)) > 1

    def check(
        self,
        own: int,
        otherwise: str = _OTHER_REQUESTS,
        *,
        key: str = "generation.differing_requests",
    ) -> None:
        """Compare a checksum with one all-gather of 4 bytes a device.

        Args:
            own: This process's checksum.
            otherwise: The error's words for a process that differs from the first.
            key: The error's key.

        Raises:
            InputError: Another process has another checksum; raised by all.
        """
        split = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        given = jax.make_array_from_callback(
            (len(self._processes),), split, lambda _: np.array([own], np.uint32)
        )
        checksums = np.asarray(self._gather(given))
        first = self._processes[0]
        for process, checksum in zip(self._processes, checksums, strict=True):
            if checksum != checksums[0]:
                raise InputError(
                    f"process {process} {otherwise.format(first)}", key=key
                )

    @cached_property
    def _processes(self) -> list[int]:
        """Process of each device."""
        return [device.process_index for device in self._mesh.devices.flat]

    @cached_property
    def _gather(self) -> Any:
        whole = NamedSharding(self._mesh, PartitionSpec())
        return jax.jit(lambda x: x, out_shardings=whole)


def check_takes_part(mesh: Any) -> None:
    """Refuse a mesh of which this process has no device."""
    if not isinstance(mesh, Mesh):
        return
    here = jax.process_index()
    there = {device.process_index for device in mesh.devices.flat}
    if here not in there:
        raise InputError(
            f"process {here} of {jax.process_count()} has none of the layout's "
            f"{mesh.size} devices; give a layout of all {jax.device_count()} devices, "
            "or devices= of this process",
            key="mesh.process_without_devices",
        )
