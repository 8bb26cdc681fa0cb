"""Checks that processes and devices compute the same: one step, the same bits twice."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshpar.distributed import Processes
from meshpar.errors import InputError
from meshpar.rules.sharding import path_name
from meshpar.train.state import TrainState
from meshpar.train.step import Batch, TrainStep

_CALLBACK = re.compile(r"custom_call @\w*callback.*")
"""A Python callback in StableHLO; its address differs between processes."""


def check_same_step(
    processes: Processes, step: TrainStep, state: TrainState, batch: Mapping[str, Any]
) -> None:
    """Compare the lowered step and the parameters of all processes.

    Call it in all processes before the first step. Programs that differ wait for one
    another's collectives without end, or exchange numbers that mean different things.
    It lowers the step once more and reads each of the parameters' shards here.

    Args:
        processes: The processes of the job; with one, nothing is compared.
        step: The step of this process.
        state: From `init` or a checkpoint.
        batch: As `step.place` returns it.

    Raises:
        InputError: A process has another step or other parameters; the error names it.
    """
    if processes.num_processes == 1:
        return
    text = _CALLBACK.sub("callback", step.lower(batch).as_text())
    found = processes.gather([zlib.crc32(text.encode()), _sums(state.params)])
    programs, shards = zip(*found, strict=True)
    for process, program in enumerate(programs):
        if program != programs[0]:
            raise InputError(
                f"the lowered step of process {process} differs from that of process 0 "
                f"(CRC-32 {program:08x} and {programs[0]:08x}); give all processes the "
                "same code, options and data format",
                key="processes.different_step",
            )
    _check_shards(shards)


def _check_shards(shards: tuple[Mapping[str, int], ...]) -> None:
    """Raise if two processes hold different values of the same shard."""
    holder: dict[str, int] = {}
    for process, sums in enumerate(shards):
        for shard, crc in sums.items():
            first = holder.setdefault(shard, process)
            if shards[first][shard] != crc:
                raise InputError(
                    f"process {process} and process {first} have different values of "
                    f"{shard}; give all processes the same seed, weights and "
                    "checkpoint",
                    key="processes.different_parameters",
                )


def _sums(params: Any) -> dict[str, int]:
    """Return the CRC-32 of each shard of this process, once for all its copies."""
    sums: dict[str, int] = {}
    for path, array in jax.tree.leaves_with_path(params):
        for shard in array.addressable_shards:
            name = f"{path_name(path)}{_place(shard.index, array.shape)}"
            if name not in sums:
                values = np.ascontiguousarray(shard.data)
                sums[name] = zlib.crc32(values.reshape(-1).view(np.uint8).data)
    return sums


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """Return a shard's place as NumPy writes it; empty if it is the whole array.

    Example:
        >>> _place((slice(0, 2), slice(None)), (4, 3))
        '[0:2, 0:3]'
    """
    bounds = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
    if all(bound == (0, size) for bound, size in zip(bounds, shape, strict=True)):
        return ""
    return f"[{', '.join(f'{start}:{end}' for start, end in bounds)}]"


DeviceSums = dict[tuple[str, str], int]
"""(path of an array, device) -> CRC-32 of the bytes that the device holds of it."""


def replay(step: TrainStep, state: TrainState, batch: Batch) -> str | None:
    """Compute loss and gradients twice, and return a line on what differs, or None.

    One program on one state and one batch gives the same bits again, as long as its
    devices are sound. It takes twice the gradients' time, and their memory once. An
    error spreads through reductions, so that the device that made it is one of those
    named. Only this process's devices are compared.

    Args:
        step: The compiled step.
        state: From `init` or a step; it is not donated.
        batch: As a step takes it.
    """
    placed = step.place(batch)
    first, second = (_array_sums(step, state, placed) for _ in range(2))
    return difference(first, second)


def difference(first: DeviceSums, second: DeviceSums) -> str | None:
    """Return a line on the arrays and devices whose bits differ, or None.

    Example:
        >>> difference({("loss", "cpu:0"): 1}, {("loss", "cpu:0"): 2})
        'computed twice, loss is not the same on cpu:0'
    """
    differing = [key for key in first if first[key] != second[key]]
    if not differing:
        return None
    paths = sorted({path for path, _ in differing})
    devices = sorted({device for _, device in differing})
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"computed twice, {paths[0]}{more} is not the same on {', '.join(devices)}"


def _array_sums(step: TrainStep, state: TrainState, batch: Batch) -> DeviceSums:
    loss, gradients = step.loss_and_gradients(state, batch)
    arrays: Any = {"loss": loss, "gradients": gradients}
    return {
        (path_name(path), str(shard.device)): zlib.crc32(
            np.asarray(shard.data).tobytes()
        )
        for path, array in jax.tree.leaves_with_path(arrays)
        for shard in array.addressable_shards
    }
