"""Stage splits: the number of layers of each stage, even, by hand or by cost.

In lock step every rank runs as many places in a tick as the longest stage has layers,
so that a stage pays for its places without a layer too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from numbers import Integral

from meshpar.errors import InputError


def stage_sizes(
    num_layers: int, num_ranks: int, chunks: int = 1, splits: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the number of layers of each stage, first to last.

    Args:
        num_layers: Layers of all stages.
        num_ranks: Ranks of the pipeline.
        chunks: Stages of each.
        splits: Layers of each stage; as even as possible when absent.

    Raises:
        InputError: More stages than layers, or splits that are not the stages', are no
            whole numbers or do not add up to the layers.
    """
    if problem := split_problem(num_layers, num_ranks, chunks, splits):
        raise problem
    return tuple(splits) or split_evenly(num_layers, num_ranks * chunks)


def split_problem(
    num_layers: int, num_ranks: int, chunks: int = 1, splits: Sequence[int] = ()
) -> InputError | None:
    """Return the error that `stage_sizes` raises, or None."""
    num_stages = num_ranks * chunks
    if num_stages > num_layers:
        return InputError(
            f"stage={num_ranks} x chunks={chunks} are {num_stages} stages, but the "
            f"model has {num_layers} layers; take fewer stages or chunks",
            key="layout.too_many_stages",
        )
    if not splits:
        return None
    shown = "/".join(map(str, splits))
    if not all(isinstance(size, Integral) for size in splits):
        return InputError(
            f"splits={shown} has sizes that are no whole numbers; give the layers of "
            "each stage as such",
            key="layout.splits_not_whole",
        )
    if len(splits) != num_stages:
        return InputError(
            f"splits={shown} has {len(splits)} sizes for {num_stages} stages; give one "
            "for each stage, first to last",
            key="layout.splits_not_stages",
        )
    if min(splits) < 1 or sum(splits) != num_layers:
        return InputError(
            f"splits={shown} has {sum(splits)} layers in all, but the model has "
            f"{num_layers}; make them add up, at least 1 each",
            key="layout.splits_not_layers",
        )
    return None


def split_evenly(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, the longer stages first.

    Example:
        >>> split_evenly(30, 4)
        (8, 8, 7, 7)
    """
    shorter, longer = divmod(num_layers, num_stages)
    return (shorter + 1,) * longer + (shorter,) * (num_stages - longer)


def split_by_cost(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the layers of each stage for the shortest longest tick: `splits=cost`.

    A place without a layer costs what a layer does on average. The even split stands
    where no other has a shorter tick.

    Args:
        costs: Of each layer, in any unit.
        num_stages: Stages, none of them empty.

    Example:
        >>> split_by_cost([9, 9, 9, 1, 1], 2), split_by_cost([1] * 3 + [4] * 13, 4)
        ((2, 3), (4, 4, 4, 4))
    """
    even = split_evenly(len(costs), num_stages)
    best_cost, best_sizes = tick_cost(costs, even), even
    mean = sum(costs) / len(costs)
    # Where the longest stage has one layer more, every stage has one place more.
    for most in range(max(even), len(costs) - num_stages + 2):
        if most * mean >= best_cost:
            break  # what the stages cost on average, their empty places included
        sizes = _split(costs, num_stages, most, mean)
        cost = tick_cost(costs, sizes)
        if cost < best_cost * (1 - _ROUNDING):
            best_cost, best_sizes = cost, sizes
    return best_sizes


def tick_cost(costs: Sequence[float], sizes: Sequence[int]) -> float:
    """Return the cost of the costliest stage, with its places without a layer.

    Example:
        >>> tick_cost([3, 1, 1, 1], [1, 3]), tick_cost([3, 1, 1, 1], [2, 2])
        (6.0, 4.0)
    """
    sums = [0.0, *accumulate(costs)]
    stops = list(accumulate(sizes))
    mean, most = sums[-1] / len(costs), max(sizes)
    return max(
        sums[stop] - sums[stop - size] + mean * (most - size)
        for stop, size in zip(stops, sizes, strict=True)
    )


_ROUNDING = 1e-12
"""Part of a cost that two sums of the same costs may differ by."""


def _split(
    costs: Sequence[float], num_stages: int, most: int, empty_cost: float
) -> tuple[int, ...]:
    """Return sizes of stages of at most `most` layers whose costliest costs least."""
    import numpy as np  # here: to read a layout takes none of it

    sums = np.concatenate([[0.0], np.cumsum(costs)])
    num_layers = len(costs)
    # best[k, n]: the least possible cost of the costliest of k stages of n layers.
    best = np.full((num_stages + 1, num_layers + 1), math.inf)
    cut = np.zeros((num_stages + 1, num_layers + 1), int)
    best[0, 0] = 0.0
    for stage in range(1, num_stages + 1):
        for stop in range(stage, num_layers + 1):
            starts = np.arange(max(stage - 1, stop - most), stop)
            empty = empty_cost * (most - (stop - starts))
            own = sums[stop] - sums[starts] + empty
            worst = np.maximum(best[stage - 1, starts], own)
            at = int(np.argmin(worst))
            best[stage, stop], cut[stage, stop] = worst[at], starts[at]
    sizes, stop = [], num_layers
    for stage in range(num_stages, 0, -1):
        sizes.append(stop - int(cut[stage, stop]))
        stop = int(cut[stage, stop])
    return tuple(reversed(sizes))
