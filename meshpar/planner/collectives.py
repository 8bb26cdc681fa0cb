"""Bytes that one device sends in a step, collective by collective."""

from __future__ import annotations

from typing import NamedTuple

from meshpar.planner.block_time import block_parameters
from meshpar.planner.collective_cost import wire_bytes
from meshpar.planner.memory import end_parameters, rank_parameters
from meshpar.planner.run import Run


class Collective(NamedTuple):
    """All collectives of one kind and purpose together.

    Args:
        mesh_axes: Whose devices take part together.
        kind: As XLA calls it.
        wire_bytes: What one device of the first rank sends in a step.
        link: `host`, `torus` or `network`.
        reason: What it is for.
    """

    mesh_axes: tuple[str, ...]
    kind: str
    wire_bytes: float
    link: str
    reason: str


def collectives_of(run: Run) -> tuple[Collective, ...]:
    """Every collective of a step that moves parameters, gradients or activations."""
    found = [
        *_tensor(run),
        *_expert(run),
        *_context(run),
        *_fsdp(run),
        *_stage(run),
        *_reduction(run),
    ]
    return tuple(collective for collective in found if collective.wire_bytes > 0)


def _layers(run: Run) -> list[int]:
    return [layer for chunk in run.blocks_of_rank(0) for layer in chunk]


def _of(run: Run, mesh_axis: str, kind: str, payload: float, reason: str) -> Collective:
    size = getattr(run.layout, mesh_axis)
    sent = wire_bytes(kind, payload, size)
    return Collective((mesh_axis,), kind, sent, run.link(mesh_axis).name, reason)


def _tensor(run: Run) -> list[Collective]:
    """Two sums of the residual stream a block, forward and backward."""
    passes = 2 * len(_layers(run)) * run.layout.microbatches
    forwards = 2 if run.layout.remat == "full" else 1
    if run.layout.remat == "selective" and not run.execution.attention_selective:
        forwards = 1.5
    payload = run.residual_bytes * passes
    if not run.layout.sequence_parallel:
        both = payload * (forwards + 1)
        return [_of(run, "tensor", "all-reduce", both, "sums of the residual stream")]
    gathers = payload * (forwards + 2)
    scatters = payload * (forwards + 1)
    return [
        _of(run, "tensor", "all-gather", gathers, "residual stream before a matmul"),
        _of(run, "tensor", "reduce-scatter", scatters, "residual stream behind it"),
    ]


def _expert(run: Run) -> list[Collective]:
    layers = sum(run.workload.is_moe(layer) for layer in _layers(run))
    routed = run.residual_bytes * run.workload.top_k / run.layout.tensor
    forwards = 2 if run.layout.remat == "full" else 1
    payload = 2 * routed * layers * run.layout.microbatches * (forwards + 1)
    return [_of(run, "expert", "all-to-all", payload, "tokens to their experts")]


def _context(run: Run) -> list[Collective]:
    layout, workload = run.layout, run.workload
    if layout.context == 1:
        return []
    heads = (workload.query_dim + workload.value_dim) * run.dtype_bytes / layout.tensor
    keys_values = run.tokens * workload.kv_heads * heads
    passes = len(_layers(run)) * layout.microbatches
    if layout.attention == "ring":
        sent = 3 * passes * keys_values * (layout.context - 1)
        kind, reason = "collective-permute", "keys and values around the ring"
    elif layout.attention == "allgather":
        sent = 3 * passes * keys_values * layout.context
        kind, reason = "all-gather", "keys and values of the whole sequence"
    else:
        queries = run.tokens * workload.heads * heads
        sent = 2 * passes * (keys_values + queries)
        kind, reason = "all-to-all", "heads for sequence, and back"
    return [_of(run, "context", kind, sent, reason)]


def _fsdp(run: Run) -> list[Collective]:
    layout = run.layout
    if layout.fsdp == 1 or layout.zero < 3:
        return []
    blocks = layout.microbatches * sum(
        block_parameters(run, moe=run.workload.is_moe(layer)) for layer in _layers(run)
    )
    ends = end_parameters(run, 0)
    gathered = (2 * blocks + ends) * run.dtype_bytes
    scattered = (blocks + ends) * run.execution.reduction_bytes
    return [
        _of(run, "fsdp", "all-gather", gathered, "parameters for use"),
        _of(run, "fsdp", "reduce-scatter", scattered, "gradients of them"),
    ]


def _stage(run: Run) -> list[Collective]:
    layout = run.layout
    if layout.stage == 1:
        return []
    own = run.residual_bytes * run.residual_share
    hops = 2 * layout.microbatches * layout.chunks * own
    found = [_of(run, "stage", "collective-permute", hops, "hops between stages")]
    if run.execution.shared_ends:
        moved = 2 * layout.microbatches * own
        reason = "tokens of embedding and head shared by all ranks"
        for kind in ("all-gather", "reduce-scatter"):
            found.append(_of(run, "stage", kind, moved, reason))
    return found


def _reduction(run: Run) -> list[Collective]:
    layout, each = run.layout, run.execution.reduction_bytes
    parameters = rank_parameters(run, 0)
    found = []
    if layout.fsdp > 1 and layout.zero < 3:
        kind = "all-reduce" if layout.zero == 0 else "reduce-scatter"
        found.append(_of(run, "fsdp", kind, parameters * each, "gradients"))
        if layout.zero > 0:
            weights = parameters * run.execution.weight_bytes
            found.append(_of(run, "fsdp", "all-gather", weights, "updated parameters"))
    own = parameters / (layout.fsdp if layout.zero > 0 else 1) * each
    found.append(_of(run, "data", "all-reduce", own, "gradients"))
    return found
