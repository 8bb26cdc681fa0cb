"""States: how devices of a mesh shape may keep parameters and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from meshpar.layout import Layout
from meshpar.planner.cost.run import Run
from meshpar.planner.search.space import Constraints, State

_PLAIN = Layout()
LARGE_STATE = 0.25
"""Fraction of a device's memory from which its optimizer state may be shared out over
`context` too, or go to the host."""


def mesh_states(
    like: Run, mesh: Layout, constraints: Constraints, *, moves_more: bool
) -> Iterator[State]:
    """Yield values of the keys of a `State` that can help.

    Of two that mean the same (ZeRO-1 over `data` or over `fsdp` alone) one is left out,
    and so are split parameters of 16 bits, which their master makes larger, and the
    host's memory for an optimizer state that is small beside a device's.
    """
    workload = like.workload
    if "zero" in constraints.kept:
        levels: tuple[int, ...] = (mesh.zero,)
    elif mesh.zero_axes:
        levels = (3, 2, 1)
    elif mesh.fsdp > 1:
        levels = (3, 2, 1) if mesh.data > 1 else (3,)
    else:  # Replicas that train by themselves share nothing out.
        shares = mesh.data * mesh.expert > 1 and mesh.sync_every == 1
        levels = (3, 2, 1) if shares else (_PLAIN.zero,)
        if mesh.expert > 1:
            levels = (*levels, 0)
    splits_by_zero = _splits_by_zero(mesh)
    for zero in levels:
        splits = splits_by_zero[zero]
        if workload.hidden % splits:
            continue  # our parameters are split along it, evenly
        gathers = ("step", "microbatch") if zero == 3 and splits > 1 else ("step",)
        whole = splits == 1 or (zero < 3 and not like.execution.splits_stored)
        half = mesh.precision == "bf16" and whole and not like.execution.eager
        fills = state_share(like, mesh, splits) > LARGE_STATE
        memories = ("device", "host") if moves_more and fills else ("device",)
        yield from product(
            (zero,),
            constraints.choices("fsdp_gather", gathers),
            constraints.choices("param_dtype", ("fp32", "bf16") if half else ("fp32",)),
            constraints.choices("optimizer_memory", memories),
        )


def _splits_by_zero(mesh: Layout) -> dict[int, int]:
    """Return the parts that states are split into, by the value of `zero`.

    ZeRO-1 and ZeRO-2 split them over the same axes.
    """
    sizes = mesh.mesh_shape
    of_two, of_three = (
        math.prod(sizes[axis] for axis in replace(mesh, zero=zero).split_axes)
        for zero in (2, 3)
    )
    return {0: 1, 1: of_two, 2: of_two, 3: of_three}


def state_share(like: Run, mesh: Layout, splits: int) -> float:
    """Return the least fraction of a device's memory that optimizer state fills."""
    devices = mesh.stage * mesh.tensor * max(splits, mesh.expert)
    state = like.workload.num_parameters * like.execution.state_bytes
    return state / devices / like.cluster.device.usable_bytes
