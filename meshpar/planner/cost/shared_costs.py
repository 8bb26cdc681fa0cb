"""Shared costs: what all ways to run a mesh shape have in common, once a step."""

from __future__ import annotations

import math
from typing import NamedTuple

from meshpar.planner.cost.kernel_time import memory_s
from meshpar.planner.cost.parameters import rank_parameters, stored_bytes, update_bytes
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.traffic import step_rows, weight_rows
from meshpar.planner.cost.traffic_row import BLOCKS, LAST_BACKWARD
from meshpar.planner.cost.traffic_time import exposed, row_s


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
    if layout.optimizer_memory == "host":
        state_bytes = 0
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
    """The update, and what is moved once that no work hides."""
    parameters = rank_parameters(run, 0) / run.state_shards
    hidden = {BLOCKS: math.inf}
    if run.execution.reduction_overlap:
        hidden[LAST_BACKWARD] = math.inf
    moved = exposed(run, step_rows(run, ranks=(0,)), hidden)
    return memory_s(run, parameters * update_bytes(run)) + moved.total_s


def _gathers_s(run: Run, moe: bool) -> tuple[float, float]:
    """A layer's split weights gathered, and its gradients scattered."""
    seconds = {"forward": 0.0, "backward": 0.0}
    for row in weight_rows(run, moe=moe):
        seconds[row.passes] += row_s(run, row)
    return seconds["forward"], seconds["backward"]
