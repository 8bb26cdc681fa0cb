"""What bounds are made of: a block alone, and what a pipeline's first rank holds."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from meshpar.planner.cost.block_time import block_time
from meshpar.planner.cost.block_workspace import in_chunks_bytes
from meshpar.planner.cost.run import Run
from meshpar.planner.search.space import Variant
from meshpar.planner.workload.activations import (
    everything_bytes,
    kept_bytes,
    stage_input_bytes,
)
from meshpar.schedules import SCHEDULES
from meshpar.schedules.stage_splits import stage_sizes


class BoundTime(NamedTuple):
    """One block and one microbatch on one device, without what `fsdp` adds."""

    spare_s: tuple[float, float]
    total_s: tuple[float, float]


class BoundMemory(NamedTuple):
    """What such a block keeps."""

    kept_bytes: float
    again_bytes: float
    input_bytes: float
    inner_bytes: float
    """What it keeps while its stage is computed again."""


@lru_cache(maxsize=4096)
def first_blocks(
    layers: int, ranks: int, schedule: str, chunks: int, splits: tuple[int, ...]
) -> int:
    """Blocks of the first rank's stages."""
    sizes = stage_sizes(layers, ranks, chunks, splits)
    return sum(sizes[at] for at in SCHEDULES[schedule].stages_of(0, ranks, chunks))


def held_microbatches(ranks: int, variant: Variant, *, lock_step: bool) -> float:
    """Microbatches that the first rank holds, at least: one chunk if no more is known.

    Reference: Narayanan et al. 2021, section 2.2.
    """
    return held_by(
        variant.schedule, ranks, variant.microbatches, variant.chunks, lock_step
    )


@lru_cache(maxsize=4096)
def held_by(
    schedule: str, ranks: int, count: int, chunks: int, lock_step: bool
) -> float:
    """`held_microbatches`, by a schedule's name; 1 without stages."""
    if ranks == 1:
        return 1
    forms = SCHEDULES[schedule].closed_forms
    if forms is None:
        return 1 / chunks
    in_flight = forms.lock_step_in_flight if lock_step else forms.in_flight
    return in_flight(ranks, count, chunks)[0] / chunks


def places(
    layers: int, ranks: int, chunks: int, kinds: tuple[tuple[bool, int], ...]
) -> float:
    """Blocks of the longest stage, or their mean where blocks are of two kinds."""
    mean = layers / (ranks * chunks)
    return math.ceil(mean) if len(kinds) == 1 else mean


def bound_time(run: Run, moe: bool) -> BoundTime:
    """Of the block of a run, with or without routed experts."""
    time = block_time(run, moe=moe)
    return BoundTime(time.spare_s, (time.forward.total_s, time.backward.total_s))


def bound_memory(run: Run, moe: bool) -> BoundMemory:
    """Of the block of a run, with or without routed experts."""
    again = everything_bytes(run, moe=moe) - in_chunks_bytes(run, moe=moe)
    inputs = stage_input_bytes(run)
    inner = again if run.layout.remat == "stage" else inputs
    return BoundMemory(kept_bytes(run, moe=moe), again, inputs, inner)
