"""Bytes of traffic: what one device sends in a step, collective by collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshpar.planner.cost.pipeline_time import lock_step
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.step_traffic import step_rows
from meshpar.planner.cost.traffic import block_rows, end_rows, hop_rows, weight_rows
from meshpar.planner.cost.traffic_row import SECONDS, Row
from meshpar.planner.cost.traffic_time import link_of, members
from meshpar.planner.machine.collective_cost import wire_bytes


class Sent(NamedTuple):
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
    once: int = 1


def sent_in_a_step(run: Run) -> tuple[Sent, ...]:
    """Every collective of a step that moves parameters, gradients or activations."""
    passes = _passes(run)
    sent: dict[tuple, float] = {}
    for row, blocks in _every_row(run, passes):
        link = link_of(run, row)
        as_sum = row.kind == "reduce-scatter" and link.scatters_whole
        kind = "all-reduce" if as_sum else row.kind
        each = wire_bytes(kind, row.payload_bytes, members(run, row))
        times = blocks * row.times * getattr(passes, row.passes)
        purpose = (row.mesh_axes, kind, link.name, row.reason)
        sent[purpose] = sent.get(purpose, 0.0) + times * each
    return tuple(
        Sent(mesh_axes, kind, num_bytes, link, reason)
        for (mesh_axes, kind, link, reason), num_bytes in sent.items()
        if num_bytes > 0
    )


def _every_row(run: Run, passes: _Passes) -> Iterator[tuple[Row, int]]:
    """The first rank's rows, each with the number of blocks that have it."""
    layers_with = sum(run.workload.is_moe(layer) for layer in passes.layers)
    for moe, blocks in ((False, len(passes.layers) - layers_with), (True, layers_with)):
        if blocks:
            rows = (*block_rows(run, moe=moe), *weight_rows(run, moe=moe))
            yield from ((row, blocks) for row in rows if row.only != SECONDS)
    rows = (*end_rows(run), *hop_rows(run), *step_rows(run, ranks=(0,)))
    yield from ((row, 1) for row in rows if row.only != SECONDS)


def _passes(run: Run) -> _Passes:
    """In lock step every rank runs its longest chunk in every tick, work or not."""
    layout = run.layout
    if layout.stage == 1 or not run.execution.lock_step:
        layers = tuple(layer for chunk in run.blocks_of_rank(0) for layer in chunk)
        count = layout.microbatches
        hops = count * layout.chunks if layout.stage > 1 else 0
        return _Passes(count, count, count, hops, hops, layers)
    steps = lock_step(layout.schedule, layout.stage, layout.microbatches, layout.chunks)
    longest = max(map(tuple, run.blocks_of_rank(0)), key=len)
    places = max(run.stage_blocks)
    layers = longest + longest[-1:] * (places - len(longest))
    forward, backward = steps.forward_ticks, steps.backward_ticks
    head, down = steps.head_ticks, steps.down_hops
    return _Passes(forward, backward, head, forward, down, layers)
