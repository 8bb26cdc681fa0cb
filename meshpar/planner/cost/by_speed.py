"""Shares by speed: fewer blocks or microbatches on slow devices, for shorter steps.

Of stages for the shortest ticks that fit; of parts of `data` for the shortest time of
all microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import mul

from meshpar.planner.cost.memory import fullest_memory
from meshpar.planner.cost.parts import (
    Part,
    may_be_uneven,
    run_parts,
    shards_may_be_uneven,
)
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.step_time import stage_times, step_time
from meshpar.planner.machine.mixed import crossing_shares
from meshpar.schedules.stage_splits import split_evenly


def by_speed(run: Run, capacity_bytes: float = math.inf) -> Run:
    """Return the run with blocks by the speed of their devices, as far as they fit.

    The run itself if no stage may be shorter than another, or if even ones are as fast.
    Where `data` crosses the kinds, the same of its parts and their microbatches.
    """
    if shards_may_be_uneven(run):
        return _shards_by_speed(run)
    if not may_be_uneven(run):
        return run
    parts = run_parts(run)
    speeds = [_speed(part) for part in parts]
    counts = [len(part.stages) for part in parts]
    smallest = math.inf
    for totals in blocks_by_speed(run.workload.layers, speeds, counts):
        blocks = _stage_blocks(parts, totals)
        if max(blocks) >= smallest:
            continue
        splits = () if blocks == run.stage_blocks else blocks
        layout = replace(run.layout, splits=splits)
        found = replace(run, layout=layout, stage_blocks=blocks)
        if fullest_memory(found).total_bytes <= capacity_bytes:
            return found
        smallest = max(blocks)
    return run


def _shards_by_speed(run: Run) -> Run:
    """Return the run with microbatches by speed, or itself if it is as fast."""
    layout = run.layout
    places = [len(own) for own in crossing_shares(run.cluster, layout.data)]
    stages = (stage_times(part.run)[0] for part in run_parts(run))
    seconds = [one.forward.total_s + one.backward.total_s for one in stages]
    counts = counts_by_speed(layout.data * layout.microbatches, seconds, places)
    each = math.gcd(*places)
    splits = tuple(
        count
        for count, number in zip(counts, places, strict=True)
        for _ in range(number // each)
    )
    if len(set(splits)) == 1:
        return run
    found = replace(run, layout=replace(layout, data_splits=splits))
    return min(run, found, key=lambda one: step_time(one).step_s)


def counts_by_speed(
    total: int, seconds: Sequence[float], places: Sequence[int]
) -> tuple[int, ...]:
    """Return the microbatches of a part of `data` on each kind of device.

    Those that take the least time of all ways to share them out, at least one a part.

    Args:
        total: Microbatches of all parts; a multiple of the number of parts.
        seconds: Of a microbatch on each kind.
        places: Number of parts on each kind.

    Example:
        >>> counts_by_speed(32, [1.0, 3.0], [2, 2])
        (12, 4)
    """

    def step_s(counts: tuple[int, ...]) -> float:
        return max(map(mul, counts, seconds))

    each = (range(1, total // number + 1) for number in places[:-1])
    ways = []
    for counts in product(*each):
        last, rest = divmod(total - sum(map(mul, counts, places)), places[-1])
        if last > 0 and not rest:
            ways.append((*counts, last))
    return min(ways, key=step_s)


def _speed(part: Part) -> StageSpeed:
    """Return the seconds of a stage on the devices of a part."""
    run = part.run
    every, blocks = stage_times(run), stage_times(run, blocks_only=True)
    passes = ("forward", "backward")
    block_s = [sum(getattr(one, way).total_s for one in blocks) for way in passes]
    other_s = [sum(getattr(one, way).total_s for one in every) for way in passes]
    layers, stages = run.workload.layers, run.num_stages
    return StageSpeed(
        block_s=tuple(s / layers for s in block_s),
        other_s=tuple(
            (whole - own) / stages for whole, own in zip(other_s, block_s, strict=True)
        ),
    )


def _stage_blocks(parts: tuple[Part, ...], totals: tuple[int, ...]) -> tuple[int, ...]:
    """Return the blocks of every stage, each part's total shared out evenly."""
    blocks: dict[int, int] = {}
    for part, total in zip(parts, totals, strict=True):
        stages = sorted(part.stages)
        blocks |= zip(stages, split_evenly(total, len(stages)), strict=True)
    return tuple(blocks[stage] for stage in sorted(blocks))


@dataclass(frozen=True, kw_only=True)
class StageSpeed:
    """Seconds of a stage on one kind of device: forward and backward of a microbatch.

    Args:
        block_s: Seconds of a block in each.
        other_s: Seconds of all else in each: shares of the ends, hops.
    """

    block_s: tuple[float, float]
    other_s: tuple[float, float]

    def stage_s(self, num_blocks: int) -> tuple[float, float]:
        """Return the seconds of a stage of so many blocks."""
        forward_s, backward_s = (
            num_blocks * block_s + other_s
            for block_s, other_s in zip(self.block_s, self.other_s, strict=True)
        )
        return forward_s, backward_s


def blocks_by_speed(
    num_blocks: int, speeds: Sequence[StageSpeed], stages: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return blocks of a stage of each kind of device, the shortest ticks first.

    A tick takes the longest forward and the longest backward of all stages. Kinds are
    few: all numbers of blocks of a stage are tried for each kind but the last, whose
    stages share the rest out.

    Args:
        num_blocks: Blocks of all stages.
        speeds: Speed of each kind.
        stages: Number of stages on each kind.

    Returns:
        For each way the total number of blocks on each kind.
    """
    spare = num_blocks - sum(stages)

    def tick_s(totals: tuple[int, ...]) -> float:
        longest = zip(
            *(
                speed.stage_s(-(-total // count))
                for speed, total, count in zip(speeds, totals, stages, strict=True)
            ),
            strict=True,
        )
        return sum(map(max, longest))

    each = (range(count, spare + count + 1) for count in stages[:-1])
    ways = (
        (*totals, num_blocks - sum(totals))
        for totals in product(*each)
        if num_blocks - sum(totals) >= stages[-1]
    )
    return sorted(ways, key=tick_s)
