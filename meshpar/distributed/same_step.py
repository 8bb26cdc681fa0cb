"""Whether all processes are about to train the same step from the same parameters."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshpar.distributed.processes import Processes
from meshpar.errors import InputError

if TYPE_CHECKING:
    from meshpar.train.state import TrainState
    from meshpar.train.step import TrainStep

_CALLBACK = re.compile(r"custom_call @\w*callback.*")
"""A call of Python in StableHLO: it holds an address, other ones in other processes."""


def check_same_step(
    processes: Processes, step: TrainStep, state: TrainState, batch: Mapping[str, Any]
) -> None:
    """Compares the lowered step and the parameters that several processes hold.

    Call it in all processes before the first step. Programs that differ wait for one
    another's collectives without end, or exchange numbers that mean different things.
    It lowers the step once more and reads each of the parameters' shards here.

    Args:
        processes: Of the job; with one there is nothing to compare.
        step: Of this process.
        state: From `init` or a checkpoint.
        batch: As `step.place` returns it.

    Raises:
        InputError: Names a process that differs from another, and in what.
    """
    if processes.num_processes == 1:
        return
    text = _CALLBACK.sub("callback", step.lower(batch).as_text())
    found = processes.gather([zlib.crc32(text.encode()), _sums(state.params)])
    programs, shards = zip(*found, strict=True)
    for process, program in enumerate(programs):
        if program != programs[0]:
            raise InputError(
                f"process {process} has lowered another step than process 0 (CRC-32 "
                f"{program:08x} and {programs[0]:08x}): together they would not train "
                "one model; give all processes the same code, options and data format",
                key="processes.different_step",
            )
    _check_shards(shards)


def _check_shards(shards: tuple[Mapping[str, int], ...]) -> None:
    """Refuses processes that hold other values of the same shard."""
    holder: dict[str, int] = {}
    for process, sums in enumerate(shards):
        for shard, crc in sums.items():
            first = holder.setdefault(shard, process)
            if shards[first][shard] != crc:
                raise InputError(
                    f"process {process} holds other values of {shard} than process "
                    f"{first}: they do not start from one model; give all processes "
                    "the same seed, weights and checkpoint",
                    key="processes.different_parameters",
                )


def _sums(params: Any) -> dict[str, int]:
    """CRC-32 of each shard of the parameters that this process holds, by its place."""
    import jax
    import numpy as np

    from meshpar.rules.sharding import path_name

    return {
        f"{path_name(path)}{_place(shard.index, array.shape)}": zlib.crc32(
            np.asarray(shard.data).tobytes()
        )
        for path, array in jax.tree.leaves_with_path(params)
        for shard in array.addressable_shards
    }


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """A shard's place as NumPy writes it; empty where it is the whole array.

    Example:
        >>> _place((slice(0, 2), slice(None)), (4, 3))
        '[0:2, 0:3]'
    """
    bounds = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
    if all(bound == (0, size) for bound, size in zip(bounds, shape, strict=True)):
        return ""
    return f"[{', '.join(f'{start}:{end}' for start, end in bounds)}]"
