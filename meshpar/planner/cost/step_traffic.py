"""Rows of a step's end (`traffic`), and the bytes that all rows of a step send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from meshpar.planner.cost.run import (
    Run,
    end_parameters,
    has_both_tables,
    has_ends,
    rank_parameters,
    routed_parameters,
    stored_bytes,
    table_parameters,
)
from meshpar.planner.cost.seconds import (
    BLOCKS,
    LAST_BACKWARD,
    NEXT_FORWARD,
    SECONDS,
    Row,
    Rows,
    members,
    row_link,
)
from meshpar.planner.cost.traffic import (
    OF_THEM,
    PARAMETERS,
    between_devices,
    block_rows,
    by_axes,
    end_rows,
    hop_rows,
    scatters_ends_each_tick,
    split_bytes,
    weight_rows,
)
from meshpar.planner.machine.collective_cost import wire_bytes


def step_rows(run: Run, ranks: Iterable[int]) -> Rows:
    """Return the rows of the step's end, on the ranks that have most parameters."""
    ranks = tuple(ranks)
    most = max(rank_parameters(run, rank) for rank in ranks)
    dense = max(
        rank_parameters(run, rank) - routed_parameters(run, rank) for rank in ranks
    )
    ends = max(end_parameters(run, rank) for rank in ranks)
    rows = [*_reductions(run, most, dense, ends), *_both_tables(run)]
    rows += _outer_gradients(run, dense, most - dense)
    if run.state_shards > 1 and run.layout.zero == 3:
        rows += _gathered_once(run, most, ends, most - dense)
    elif run.state_shards > 1:
        # ZeRO-1 and 2 gather what each device has updated.
        each = run.dtype_bytes if run.splits_parameters else stored_bytes(run)[0]
        for axes, values in by_axes(run, most, most - dense):
            updated = values * min(each, run.gathered_bytes)
            gather = Row(axes, "all-gather", updated, "updated parameters", "once")
            hidden_by = NEXT_FORWARD if _hides(run, axes) else ""
            rows.append(gather._replace(hidden_by=hidden_by))
    return between_devices(run, rows)


def _reductions(
    run: Run, parameters: float, dense: float, ends: float
) -> Iterator[Row]:
    """Rows of gradients over the mesh axes whose devices have other tokens."""
    layout, each = run.layout, run.execution.reduction_bytes
    split, others = run.state_shards, run.summed_axes

    def row(axes: tuple[str, ...], values: float, reason: str) -> Row:
        payload = values * each
        return Row(axes, "all-reduce", payload, reason, "once", hidden_by=LAST_BACKWARD)

    if split > 1 and layout.zero < 3:
        # ZeRO-1 and 2 need their own share of the sums only.
        for axes, values in by_axes(run, parameters, parameters - dense):
            whole = row(axes, values, "gradients")._replace(kind="reduce-scatter")
            yield whole if _hides(run, axes) else whole._replace(hidden_by="")
    if "expert" not in layout.split_axes:
        # Devices of `expert` have the same dense parameters, and other examples.
        yield row(("expert",), dense / split, "gradients of what is no expert")
    shared = run.execution.shared_ends and layout.stage > 1
    if shared:
        # The ranks have a share of the tokens each, so their sums are partial.
        reason = "gradients of embedding and head"
        partial = row((*others, "stage"), ends / split, reason)
        yield partial._replace(waits_on="stage")
    own = (dense - ends if shared else dense) / split
    own += (parameters - dense) / run.routed_shards
    yield row(others, own, "gradients")


def _hides(run: Run, axes: tuple[str, ...]) -> bool:
    """True if collectives over these of ZeRO's axes can run beside other work."""
    return run.execution.expert_overlap or axes == run.layout.split_axes


def _outer_gradients(run: Run, dense: float, routed: float) -> Iterator[Row]:
    """Row of local steps: parameters in fp32 once an interval, per step."""
    layout = run.layout
    if layout.sync_every > 1:
        shard = dense / run.state_shards + routed / run.routed_shards
        payload = 4 * shard / layout.sync_every
        yield Row(("data",), "all-reduce", payload, "outer gradients", "once")


def _both_tables(run: Run) -> Iterator[Row]:
    """Row of a table of tokens that the first and the last rank both have."""
    on_one_rank = has_ends(run, 0) == (True, True)
    if has_both_tables(run.workload) and not on_one_rank:
        reduced = table_parameters(run) * run.execution.reduction_bytes
        reason = "gradients of tables"
        pair = Row(("stage",), "all-reduce", reduced, reason, "once")
        yield pair._replace(members=2, only=SECONDS)


def _gathered_once(
    run: Run, parameters: float, ends: float, routed: float
) -> Iterator[Row]:
    """Rows of ZeRO-3 once a step: of all parameters, or of embedding and head.

    An untied head can move while the blocks run.
    """
    layout, head, experts = run.layout, 0.0, 0.0
    if run.gathers_once:
        ends, experts = parameters, routed
    elif run.execution.gather_overlap and layout.stage == 1:
        head = run.workload.head_parameters / layout.tensor
    parts = [(*part, "") for part in by_axes(run, ends - head, experts)]
    for split, values, hidden_by in (*parts, (layout.split_axes, head, BLOCKS)):
        gathered, reduced = split_bytes(run, values)
        axes = split if values else ()
        yield Row(axes, "all-gather", gathered, PARAMETERS, "once", hidden_by=hidden_by)
        if not scatters_ends_each_tick(run):
            scatter = Row(axes, "reduce-scatter", reduced, OF_THEM, "once")
            late = run.reduces_in_last_microbatch and run.gathers_once
            yield scatter._replace(hidden_by=LAST_BACKWARD if late else hidden_by)


class Sent(NamedTuple):
    """All collectives of one kind and purpose together.

    Args:
        mesh_axes: Mesh axes whose devices take part together.
        kind: XLA's name of the collective.
        wire_bytes: Bytes that one device of the first rank sends in a step.
        link: `host`, `torus` or `network`.
        reason: Purpose, in words.
    """

    mesh_axes: tuple[str, ...]
    kind: str
    wire_bytes: float
    link: str
    reason: str


class _Passes(NamedTuple):
    """Times that a device of the first rank runs each part of a step."""

    forward: int
    backward: int
    head: int
    up: int
    down: int
    weight_grad: int
    layers: tuple[int, ...]
    once: int = 1


def sent_in_a_step(run: Run) -> tuple[Sent, ...]:
    """Return all collectives of a step, summed by mesh axes, kind, link and reason."""
    passes = _passes(run)
    sent: dict[tuple, float] = {}
    for row, blocks in _every_row(run, passes):
        link = row_link(run, row)
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
    """Rows of the first rank, each with the number of blocks that have it."""
    layers_with = sum(run.workload.is_moe(layer) for layer in passes.layers)
    for moe, blocks in ((False, len(passes.layers) - layers_with), (True, layers_with)):
        if blocks:
            rows = (*block_rows(run, moe=moe), *weight_rows(run, moe=moe))
            yield from ((row, blocks) for row in rows if row.only != SECONDS)
    rows = (*end_rows(run), *hop_rows(run), *step_rows(run, ranks=(0,)))
    yield from ((row, 1) for row in rows if row.only != SECONDS)


def _passes(run: Run) -> _Passes:
    """Passes of a step; in lock step a rank runs its longest chunk in every tick."""
    layout = run.layout
    if layout.stage == 1 or not run.execution.lock_step:
        layers = tuple(layer for chunk in run.rank_blocks(0) for layer in chunk)
        count = max((layout.microbatches, *layout.data_splits))
        hops = count * layout.chunks if layout.stage > 1 else 0
        return _Passes(count, count, count, hops, hops, count, layers)
    steps = run.pipeline_ticks
    longest = max(map(tuple, run.rank_blocks(0)), key=len)
    places = max(run.stage_blocks)
    layers = longest + longest[-1:] * (places - len(longest))
    forward, backward = steps.forward_ticks, steps.backward_ticks
    head, down, late = steps.head_ticks, steps.down_hops, steps.weight_grad_ticks
    return _Passes(forward, backward, head, forward, down, late, layers)
