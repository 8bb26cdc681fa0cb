"""Shared costs: what all ways to run a mesh shape have in common, once a step."""

from __future__ import annotations

import math
from typing import NamedTuple

from meshpar.layout import BATCH_AXES
from meshpar.planner.cost.block_time import block_parameters
from meshpar.planner.cost.kernel_time import memory_s
from meshpar.planner.cost.memory import rank_parameters, stored_bytes, update_bytes
from meshpar.planner.cost.run import Run
from meshpar.planner.machine.collective_cost import (
    all_gather_s,
    all_reduce_s,
    reduce_scatter_s,
)


class SharedCosts(NamedTuple):
    """What all variants of a mesh shape share."""

    state_bytes: float
    once_s: float
    """Gradient reduction and optimizer, once a step."""
    gather_s: tuple[tuple[float, float], ...]
    """Of each kind of block, forward and backward."""


def shared_costs(run: Run, kinds: tuple[bool, ...]) -> SharedCosts:
    """Those of a run; `kinds` says of each kind of block whether it has experts."""
    layout, parameters = run.layout, rank_parameters(run, 0)
    whole = layout.zero == 3 and run.gathers_once
    weight_bytes, state_bytes = stored_bytes(run)
    gradient_bytes = run.execution.gradient_bytes
    state = sum(
        parameters * each / (run.state_shards if layout.zero >= level else 1)
        for each, level in (
            (weight_bytes, 3),
            (gradient_bytes, 4 if whole else 2),
            (state_bytes, 1),
        )
    )
    if whole and run.state_shards > 1:
        state += parameters * run.dtype_bytes
    gathers_s = tuple(_gathers_s(run, moe) for moe in kinds)
    return SharedCosts(state, _once_s(run), gathers_s)


def _once_s(run: Run) -> float:
    """The update, what ZeRO moves once, and the reduction of the blocks' gradients."""
    layout, execution, shards = run.layout, run.execution, run.state_shards
    parameters, axes = rank_parameters(run, 0), layout.split_axes if shards > 1 else ()
    seconds = memory_s(run, parameters / shards * update_bytes(run))
    reduced = parameters * execution.reduction_bytes
    hidden = execution.reduction_overlap
    if axes and (layout.zero < 3 or run.gathers_once):
        each = stored_bytes(run)[0] if layout.zero < 3 else run.dtype_bytes
        link = run.link(*axes)
        seconds += all_gather_s(parameters * each, shards, link)
        if layout.zero == 3 or not hidden:
            seconds += reduce_scatter_s(reduced, shards, link)
    others = tuple(axis for axis in BATCH_AXES if axis not in axes)
    degree = math.prod(layout.mesh_shape[axis] for axis in others)
    if degree == 1 or hidden:
        return seconds
    ends = run.workload.embedding_parameters + run.workload.head_parameters
    ends += run.workload.final_norm_parameters
    blocks = max(0.0, parameters - ends) / shards * execution.reduction_bytes
    return seconds + all_reduce_s(blocks, degree, run.link(*others))


def _gathers_s(run: Run, moe: bool) -> tuple[float, float]:
    """A layer's split weights gathered, and its gradients scattered."""
    layout, execution, shards = run.layout, run.execution, run.state_shards
    if shards == 1 or layout.zero < 3 or run.gathers_once:
        return 0.0, 0.0
    parameters, link = block_parameters(run, moe=moe), run.link(*layout.split_axes)
    gather_s = all_gather_s(parameters * run.dtype_bytes, shards, link)
    reduced = parameters * execution.reduction_bytes
    return gather_s, gather_s + reduce_scatter_s(reduced, shards, link)
