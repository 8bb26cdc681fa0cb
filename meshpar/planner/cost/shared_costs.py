"""Shared costs: what all ways to run a mesh shape have in common, once a step."""

from __future__ import annotations

import math
from typing import NamedTuple

from meshpar.planner.cost.kernel_time import memory_s
from meshpar.planner.cost.memory import least_working_bytes
from meshpar.planner.cost.parameters import (
    rank_parameters,
    shared_out,
    stored_bytes,
    update_bytes,
)
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.step_traffic import step_rows
from meshpar.planner.cost.traffic import weight_rows
from meshpar.planner.cost.traffic_row import BLOCKS, LAST_BACKWARD, NEXT_FORWARD
from meshpar.planner.cost.traffic_time import exposed, row_s


class SharedCosts(NamedTuple):
    """What all variants of a mesh shape share."""

    state_bytes: float
    """Parameters and their states, and what its backward has of them besides."""
    once_s: float
    """Gradient reduction and optimizer, once a step."""
    gather_s: tuple[tuple[float, float], ...]
    """Of each kind of block, forward and backward."""
    bare_s: tuple[tuple[float, float], ...]
    """Of them, what no work hides however long it takes."""


def shared_costs(run: Run, kinds: tuple[bool, ...]) -> SharedCosts:
    """Those of a run; `kinds` says of each kind of block whether it has experts."""
    layout, parameters = run.layout, rank_parameters(run, 0)
    own = shared_out(run, 0)
    whole = layout.zero == 3 and run.gathers_once
    weight_bytes, state_bytes = stored_bytes(run)
    if layout.optimizer_memory == "host":
        state_bytes = 0
    gradient_bytes = run.execution.gradient_bytes
    state = sum(
        each * (own if layout.zero >= level else parameters)
        for each, level in (
            (weight_bytes, 3),
            (gradient_bytes, 4 if whole else 2),
            (state_bytes, 1),
        )
    )
    state += least_working_bytes(run, 0)
    gathers_s, bare_s = zip(*(_gathers_s(run, moe) for moe in kinds), strict=True)
    return SharedCosts(state, _once_s(run), gathers_s, bare_s)


def _once_s(run: Run) -> float:
    """The update, and what is moved once that no work hides."""
    parameters = shared_out(run, 0)
    hidden = {BLOCKS: math.inf}
    if run.execution.reduction_overlap:
        hidden[LAST_BACKWARD] = math.inf
    if run.execution.update_overlap:
        hidden[NEXT_FORWARD] = math.inf
    waits_s = exposed(run, step_rows(run, ranks=(0,)), hidden).exposed_s
    return memory_s(run, parameters * update_bytes(run)) + sum(waits_s.values())


def _gathers_s(run: Run, moe: bool) -> tuple[tuple[float, float], tuple[float, float]]:
    """A layer's split weights gathered, and its gradients scattered; what is bare."""
    seconds = {"forward": 0.0, "backward": 0.0}
    bare_s = dict(seconds)
    for row in weight_rows(run, moe=moe):
        seconds[row.passes] += (own_s := row_s(run, row))
        bare_s[row.passes] += own_s * (1 - row.share)
    return (seconds["forward"], seconds["backward"]), (
        bare_s["forward"],
        bare_s["backward"],
    )
