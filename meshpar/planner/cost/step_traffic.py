"""Rows of a step's end: what is summed, updated and gathered once (`traffic`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshpar.planner.cost.parameters import (
    end_parameters,
    ends_of_rank,
    rank_parameters,
    routed_parameters,
    stored_bytes,
    table_parameters,
)
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.traffic import (
    OF_THEM,
    PARAMETERS,
    between_devices,
    by_axes,
    scatters_ends_each_tick,
    split_bytes,
)
from meshpar.planner.cost.traffic_row import (
    BLOCKS,
    LAST_BACKWARD,
    NEXT_FORWARD,
    SECONDS,
    Row,
    Rows,
)


def step_rows(run: Run, ranks: Iterable[int]) -> Rows:
    """Of the step's end, on those of these ranks that have most parameters."""
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
        for axes, values in by_axes(run, most, most - dense):
            updated = values * stored_bytes(run)[0]
            gather = Row(axes, "all-gather", updated, "updated parameters", "once")
            rows.append(gather._replace(beside=NEXT_FORWARD))
    return between_devices(run, rows)


def _reductions(
    run: Run, parameters: float, dense: float, ends: float
) -> Iterator[Row]:
    """Gradients over the mesh axes whose devices have other tokens."""
    layout, each = run.layout, run.execution.reduction_bytes
    split, others = run.state_shards, run.summed_axes

    def row(axes: tuple[str, ...], values: float, reason: str) -> Row:
        payload = values * each
        return Row(axes, "all-reduce", payload, reason, "once", beside=LAST_BACKWARD)

    if split > 1 and layout.zero < 3:
        # ZeRO-1 and 2 need their own share of the sums only.
        for axes, values in by_axes(run, parameters, parameters - dense):
            whole = row(axes, values, "gradients")
            yield whole._replace(kind="reduce-scatter")
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


def _outer_gradients(run: Run, dense: float, routed: float) -> Iterator[Row]:
    """Of local steps: parameters in fp32 once an interval, a step's share of them."""
    layout = run.layout
    if layout.sync_every > 1:
        shard = dense / run.state_shards + routed / run.routed_shards
        payload = 4 * shard / layout.sync_every
        yield Row(("data",), "all-reduce", payload, "outer gradients", "once")


def _both_tables(run: Run) -> Iterator[Row]:
    """Of a tied table that the first and the last rank have each: two devices' sum."""
    workload, on_one_rank = run.workload, ends_of_rank(run, 0) == (True, True)
    if workload.tied and not on_one_rank:
        reduced = table_parameters(run) * run.execution.reduction_bytes
        reason = "gradients of tables"
        pair = Row(("stage",), "all-reduce", reduced, reason, "once")
        yield pair._replace(members=2, only=SECONDS)


def _gathered_once(
    run: Run, parameters: float, ends: float, routed: float
) -> Iterator[Row]:
    """What ZeRO-3 gathers and scatters once a step: all parameters, or the ends'.

    A head of its own can move beside the blocks.
    """
    layout, head, experts = run.layout, 0.0, 0.0
    if run.gathers_once:
        ends, experts = parameters, routed
    elif run.execution.gather_overlap and layout.stage == 1:
        head = run.workload.head_parameters / layout.tensor
    parts = [(*part, "") for part in by_axes(run, ends - head, experts)]
    for split, values, beside in (*parts, (layout.split_axes, head, BLOCKS)):
        gathered, reduced = split_bytes(run, values)
        axes = split if values else ()
        yield Row(axes, "all-gather", gathered, PARAMETERS, "once", beside=beside)
        if not scatters_ends_each_tick(run):
            yield Row(axes, "reduce-scatter", reduced, OF_THEM, "once", beside=beside)
