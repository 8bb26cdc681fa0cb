"""States: how devices of a mesh shape may keep parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
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
    """Yield the states of a mesh shape that can help.

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
    for zero in levels:
        state = State(mesh.data, mesh.fsdp, mesh.zero_axes, zero)
        splits, _ = state.num_parts(mesh)
        if workload.hidden % splits:
            continue  # our parameters are split along it, evenly
        gathers = ("step", "microbatch") if zero == 3 and splits > 1 else ("step",)
        whole = splits == 1 or (zero < 3 and not like.execution.splits_stored)
        half = mesh.precision == "bf16" and whole and not like.execution.eager
        fills = state_share(like, mesh, splits) > LARGE_STATE
        memories = ("device", "host") if moves_more and fills else ("device",)
        for stored in product(
            constraints.choices("fsdp_gather", gathers),
            constraints.choices("param_dtype", ("fp32", "bf16") if half else ("fp32",)),
            constraints.choices("optimizer_memory", memories),
        ):
            yield State(*state[:4], *stored)


def state_share(like: Run, mesh: Layout, splits: int) -> float:
    """Return the least fraction of a device's memory that optimizer state fills."""
    devices = mesh.stage * mesh.tensor * max(splits, mesh.expert)
    state = like.workload.num_parameters * like.execution.state_bytes
    return state / devices / like.cluster.device.usable_bytes
