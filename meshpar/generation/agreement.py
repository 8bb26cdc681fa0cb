"""Whether all processes are about to run the same program, before any of them does.

Each process keeps its own book of slots and pages. The books are alike as long as all
have been given the same requests between the same steps; one that has not would wait in
another collective than the rest, for ever.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.errors import InputError


def digest(known: int, *values: Any) -> int:
    """32 bits of what came before and of plain values.

    Example:
        >>> digest(0, (1, 2)) == digest(0, (1, 2)), digest(0, (1, 2)) == digest(1, 3)
        (True, False)
    """
    return zlib.crc32(repr(values).encode(), known)


class Agreement:
    """What the processes of a mesh tell one another; nothing where there is one.

    Args:
        mesh: The devices.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @cached_property
    def is_shared(self) -> bool:
        """Whether several have devices of it."""
        return len(set(self._processes)) > 1

    def check(self, own: int) -> None:
        """Compares a digest: one all-gather of 4 bytes a device.

        Args:
            own: This process's.

        Raises:
            InputError: Another process has another; raised by all.
        """
        given = jax.make_array_from_callback(
            (len(self._processes),), self._split, lambda _: np.array([own], np.uint32)
        )
        known = np.asarray(self._told(given))
        others = (
            process
            for process, one in zip(self._processes, known, strict=True)
            if one != known[0]
        )
        refuse_other(self._processes[0], others)

    @cached_property
    def _processes(self) -> list[int]:
        """Of each device."""
        return [device.process_index for device in self._mesh.devices.flat]

    @cached_property
    def _split(self) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))

    @cached_property
    def _told(self) -> Any:
        whole = NamedSharding(self._mesh, PartitionSpec())
        return jax.jit(lambda x: x, out_shardings=whole)


def refuse_other(first: int, others: Iterable[int]) -> None:
    """Names the first process that is not like the first of the mesh.

    Raises:
        InputError: There is one.
    """
    for process in others:
        raise InputError(
            f"process {process} is to go on with other requests than process {first}: "
            "submit the same ones, in the same order and between the same steps, on "
            "every process, with the same tokenizer"
        )


def check_takes_part(mesh: Any) -> None:
    """Refuses a mesh of other processes' devices alone.

    Raises:
        InputError: It is one.
    """
    if not isinstance(mesh, Mesh):
        return
    here = jax.process_index()
    there = {device.process_index for device in mesh.devices.flat}
    if here not in there:
        raise InputError(
            f"process {here} of {jax.process_count()} has none of the layout's "
            f"{mesh.size} devices; give a layout of all {jax.device_count()} devices, "
            "or devices= of this process"
        )
