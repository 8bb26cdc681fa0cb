"""Bytes that one device sends in a step, collective by collective."""

from __future__ import annotations

import math
from typing import NamedTuple

from meshpar.planner.cost.block_time import block_parameters
from meshpar.planner.cost.context_traffic import context_traffic
from meshpar.planner.cost.memory import (
    end_parameters,
    rank_parameters,
    routed_parameters,
    stored_bytes,
)
from meshpar.planner.cost.pipeline_time import lock_step
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.stage_time import scatters_ends_each_tick
from meshpar.planner.machine.collective_cost import wire_bytes
from meshpar.planner.workload.recomputation import recomputation


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


class _Passes(NamedTuple):
    """How often a device of the first rank runs what, in a step."""

    forward: int
    backward: int
    head: int
    up: int
    down: int
    layers: tuple[int, ...]


def collectives_of(run: Run) -> tuple[Collective, ...]:
    """Every collective of a step that moves parameters, gradients or activations."""
    passes = _passes(run)
    found = [
        *_tensor(run, passes),
        *_expert(run, passes),
        *_context(run, passes),
        *_fsdp(run, passes),
        *_stage(run, passes),
        *_reduction(run),
    ]
    return tuple(collective for collective in found if collective.wire_bytes > 0)


def _passes(run: Run) -> _Passes:
    """In lock step every rank runs its longest chunk in every tick, work or not."""
    layout = run.layout
    if layout.stage == 1 or not run.execution.lock_step:
        layers = tuple(layer for chunk in run.blocks_of_rank(0) for layer in chunk)
        count = layout.microbatches
        hops = count * layout.chunks if layout.stage > 1 else 0
        return _Passes(count, count, count, hops, hops, layers)
    steps = lock_step(layout.schedule, layout.stage, layout.microbatches, layout.chunks)
    longest = tuple(max(run.blocks_of_rank(0), key=len))
    places = max(run.stage_blocks)
    layers = longest + longest[-1:] * (places - len(longest))
    forward, backward = steps.forward_ticks, steps.backward_ticks
    head, down = steps.head_ticks, steps.down_hops
    if run.in_order:
        head, down = forward, backward
    return _Passes(forward, backward, head, forward, down, layers)


def _of(
    run: Run, mesh_axes: tuple[str, ...], kind: str, payload: float, reason: str
) -> Collective:
    mesh_axes = tuple(axis for axis in mesh_axes if getattr(run.layout, axis) > 1)
    size = math.prod(getattr(run.layout, axis) for axis in mesh_axes)
    link = run.link(*mesh_axes)
    if kind == "reduce-scatter" and link.scatters_whole:
        kind = "all-reduce"
    sent = wire_bytes(kind, payload, size)
    return Collective(mesh_axes, kind, sent, link.name, reason)


def _tensor(run: Run, passes: _Passes) -> list[Collective]:
    """Two sums of the residual stream a block, forward and backward; and the ends'."""
    execution, again = run.execution, recomputation(run, moe=False)
    each = run.residual_bytes * len(passes.layers)
    blocks = each * (2 * passes.forward + (2 + again.sums) * passes.backward)
    # A share of the tokens: embedding rows, and the head's input gradient.
    share = run.residual_bytes / (run.layout.stage if execution.shared_ends else 1)
    rows = share * passes.forward
    ends = rows + share * passes.head
    losses = _loss(run, passes)
    reason = "sums of the residual stream"
    if not run.layout.sequence_parallel:
        return [_of(run, ("tensor",), "all-reduce", blocks + ends, reason), losses]
    # What sequence parallelism gathers of a block's norms, the backward gathers again.
    regathered = 0 if execution.keeps_gathered else 2
    gathers = each * 2 * passes.forward
    gathers += each * (2 + regathered + again.gathers) * passes.backward
    gathers += share * (passes.head + passes.backward)
    scatters = blocks + share * passes.head
    return [
        _of(run, ("tensor",), "all-gather", gathers, "sequence before a matmul"),
        _of(run, ("tensor",), "reduce-scatter", scatters, "sequence behind a matmul"),
        _of(run, ("tensor",), "all-reduce", rows, "embedding rows"),
        losses,
    ]


def _loss(run: Run, passes: _Passes) -> Collective:
    """Of each token in fp32: largest logit, sum of exponentials, its target's logit."""
    tokens = run.tokens / (run.layout.stage if run.execution.shared_ends else 1)
    values = 3 * 4 * tokens * passes.head
    return _of(run, ("tensor",), "all-reduce", values, "loss over a split vocabulary")


def _expert(run: Run, passes: _Passes) -> list[Collective]:
    layers = sum(run.workload.is_moe(layer) for layer in passes.layers)
    routed = run.residual_bytes * run.workload.top_k / run.layout.tensor
    again = recomputation(run, moe=True).exchanges
    count = passes.forward + (1 + again) * passes.backward
    payload = 2 * routed * layers * count
    return [_of(run, ("expert",), "all-to-all", payload, "tokens to their experts")]


def _context(run: Run, passes: _Passes) -> list[Collective]:
    if run.layout.context == 1:
        return []
    traffic, again = context_traffic(run), recomputation(run, moe=False).attention
    backward = (traffic.backward_passes + again) * passes.backward
    count = len(passes.layers) * (passes.forward + backward)
    payload = count * traffic.payload_bytes
    return [_of(run, ("context",), traffic.kind, payload, traffic.reason)]


def _fsdp(run: Run, passes: _Passes) -> list[Collective]:
    """ZeRO-3: parameters gathered, once or for each use, and gradients scattered."""
    layout = run.layout
    if run.state_shards == 1 or layout.zero < 3:
        return []
    blocks = sum(
        block_parameters(run, moe=run.workload.is_moe(layer)) for layer in passes.layers
    )
    ends = end_parameters(run, 0)
    gathered = blocks * (passes.forward + passes.backward) + ends
    # The ends are gathered once; every tick scatters what its head adds to their
    # gradients, and what its embedding does.
    each_tick = scatters_ends_each_tick(run)
    scatters = passes.head + passes.backward if each_tick else 1
    scattered = blocks * passes.backward + ends * scatters
    if run.gathers_once:
        gathered = scattered = rank_parameters(run, 0)
    axes, each = layout.split_axes, run.execution.reduction_bytes
    return [
        _of(run, axes, "all-gather", gathered * run.dtype_bytes, "parameters"),
        _of(run, axes, "reduce-scatter", scattered * each, "gradients of them"),
    ]


def _stage(run: Run, passes: _Passes) -> list[Collective]:
    own = run.residual_bytes * run.residual_share
    hops = (passes.up + passes.down) * own
    reason = "activations up, gradients down"
    found = [_of(run, ("stage",), "collective-permute", hops, reason)]
    if run.execution.shared_ends:
        gathers = (passes.forward + passes.head) * own
        scatters = (passes.head + passes.backward) * own
        reason = "tokens of embedding and head, shared by all ranks"
        found += [
            _of(run, ("stage",), "all-gather", gathers, reason),
            _of(run, ("stage",), "reduce-scatter", scatters, reason),
        ]
    return found


def _reduction(run: Run) -> list[Collective]:
    """Gradients over the batch axes, and those of shared ends over the ranks too."""
    layout, execution = run.layout, run.execution
    each, parameters = execution.reduction_bytes, rank_parameters(run, 0)
    found, axes = [], layout.split_axes if run.state_shards > 1 else ()
    if axes and layout.zero < 3:
        weights = parameters * stored_bytes(run)[0]
        found += [
            _of(run, axes, "reduce-scatter", parameters * each, "gradients"),
            _of(run, axes, "all-gather", weights, "updated parameters"),
        ]
    split = run.state_shards
    dense = (parameters - routed_parameters(run, 0)) / split * each
    reason = "gradients of what is no expert"
    found.append(_of(run, ("expert",), "all-reduce", dense, reason))
    others = run.summed_axes
    ends = end_parameters(run, 0) if execution.shared_ends and layout.stage > 1 else 0
    own = (parameters - ends) / split * each
    found.append(_of(run, others, "all-reduce", own, "gradients"))
    shared = ends / split * each
    reason = "gradients of embedding and head"
    found.append(_of(run, (*others, "stage"), "all-reduce", shared, reason))
    return found
