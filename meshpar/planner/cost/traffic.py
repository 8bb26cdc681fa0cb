"""Traffic: every collective of a step as a row; its seconds and bytes are sums of rows.

A row belongs to what runs it: a block, a tick's embedding and head, a hop, or the
step's end (`step_traffic`). `seconds.exposed` adds up the waiting for rows, and
`step_traffic.sent_in_a_step` the bytes that they send.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from meshpar.layout import Layout
from meshpar.parallel.sizes import PICK_BYTES, ROUTE_BYTES, WEIGHT_BYTES, head_copies
from meshpar.planner.cost.activations import (
    room_rows,
    round_parts,
    tokens_to_hosts,
)
from meshpar.planner.cost.expert_time import expert_axes, expert_devices
from meshpar.planner.cost.recomputation import Again, recomputation
from meshpar.planner.cost.run import Run, block_parameters
from meshpar.planner.cost.seconds import (
    ATTENTION,
    ATTENTION_AGAIN,
    BYTES,
    COMPUTING,
    HALVES,
    LAST_BACKWARD,
    LAYER,
    MATMULS,
    NEXT_FORWARD,
    SECONDS,
    Row,
    Rows,
)
from meshpar.planner.machine.collective_cost import (
    Condition,
    hidden_share,
    overlap_condition,
)
from meshpar.schedules import SCHEDULES

_SUMS = "sums of the residual stream"
_OF_SEQUENCE = {
    "all-reduce": _SUMS,
    "all-gather": "sequence before a matmul",
    "reduce-scatter": "sequence behind a matmul",
}


def block_rows(run: Run, *, moe: bool, again: Again | None = None) -> Rows:
    """Return the rows of one block and microbatch, without those of its weights.

    Args:
        run: The run.
        moe: Whether the block has routed experts.
        again: What its backward recomputes; what its layout's remat says when absent.
    """
    return repeated(every_block_row(run, moe=moe), again or recomputation(run, moe=moe))


def every_block_row(run: Run, *, moe: bool) -> Rows:
    """Return the rows of a block under any remat policy: those with `again` may run."""
    rows = [*_tensor(run, moe), *_context(run)]
    if moe:
        rows += _expert(run)
    return between_devices(run, rows)


def repeated(rows: Rows, again: Again) -> Rows:
    """Return the rows that run if the backward recomputes so much."""
    kept = []
    for row in rows:
        if not row.again:
            kept.append(row)
        elif times := row.times * getattr(again, row.again):
            kept.append(row._replace(times=times, again=""))
    return tuple(kept)


def _tensor(run: Run, moe: bool) -> Iterator[Row]:
    """Rows of two sums of the residual stream, forward and backward.

    One where the devices have whole experts, and share none that all tokens go to.
    """
    whole = moe and "tensor" in expert_axes(run) and not run.workload.shared_experts
    halves = HALVES[:1] if whole else HALVES

    # In chunks around the ring all but the first can run beside a matmul.
    ring = run.execution.tensor_ring
    share = 1 - 1 / run.layout.tensor if ring else 1.0

    def row(kind: str, passes: str, times: int = 1, **more: Any) -> Row:
        reason, stream = _OF_SEQUENCE[kind], run.residual_bytes
        one = Row(("tensor",), kind, stream, reason, passes, times)
        return one._replace(share=share, **more)

    if not run.layout.sequence_parallel:
        yield row("all-reduce", "forward", len(halves))
        for half in halves:
            yield row("all-reduce", "backward", hidden_by=f"{half} weights")
        yield row("all-reduce", "backward", again="sums")
        return
    for half in halves:
        hidden_by = f"{half} outputs" if ring else ""
        yield row("all-gather", "forward", hidden_by=hidden_by)
        yield row("reduce-scatter", "forward", hidden_by=hidden_by)
    for half in halves:
        # The output's gradient is gathered before anything can start, but in chunks.
        # The input is gathered again beside the matmul for its gradient, whose scatter
        # runs beside the one for the weights.
        yield row("all-gather", "backward", hidden_by=f"{half} inputs" if ring else "")
        if not run.execution.keeps_gathered:
            yield row("all-gather", "backward", hidden_by=f"{half} inputs")
        yield row("reduce-scatter", "backward", hidden_by=f"{half} weights")
    if run.workload.modulations and not run.execution.eager:
        # The gradient of a gated output is gathered for each of its two matmuls, as
        # compiled for 8 H100 with `fsdp=4,tensor=2` (jax 0.10.2).
        yield row("all-gather", "backward", len(HALVES))
    yield row("all-gather", "backward", again="gathers")
    yield row("reduce-scatter", "backward", again="sums")


def _expert(run: Run) -> Iterator[Row]:
    """Rows of tokens sent to their experts and back.

    An eager program sends the tokens that there are, each device of `tensor` its part;
    a compiled one sends rooms of fixed size, filled or not (`expert_rooms`).
    """
    workload = run.workload
    if run.execution.eager:
        there = run.residual_bytes * _copies_sent(run) / run.layout.tensor
        results = back = there
    else:
        rows = room_rows(run)
        hosts, tokens = tokens_to_hosts(run)
        if tokens:
            yield from _expert_by_host(run, rows, hosts, tokens)
            return
        results = rows * workload.hidden * run.dtype_bytes
        there, back = results + rows * ROUTE_BYTES, results + rows * WEIGHT_BYTES

    # Only parts have matmuls of other parts beside them, or microbatches of others.
    overlaps = run.execution.exchange_overlap
    share = 1.0 if overlaps or round_parts(run) > 1 else 0.0
    hidden_by = COMPUTING if overlaps else ""
    if run.pairs_ticks:
        # Not while the pipeline fills or drains.
        hidden_by, share = (
            MATMULS,
            1.0 - run.num_stages / run.pipeline_ticks.forward_ticks,
        )

    def row(payload: float, passes: str, reason: str, again: str = "") -> Row:
        one = Row(expert_axes(run), "all-to-all", payload, reason, passes, 1, hidden_by)
        return one._replace(share=share, again=again)

    yield row(there, "forward", _THERE)
    yield row(results, "forward", _BACK)
    yield row(results, "backward", _THERE)
    yield row(back, "backward", _BACK)
    yield row(there, "backward", _THERE, "exchanges")
    if run.execution.eager:
        yield row(results, "backward", _BACK, "exchanges")


def _copies_sent(run: Run) -> float:
    """Number of copies of a token that exchanges send.

    One for each of its experts; or between hosts one for each with any of them, of
    which each of h is without with a probability of (1 - 1/h)^k. Those to a token's own
    host are sent beside them.
    """
    link, copies = run.link(*expert_axes(run)), run.workload.top_k
    if not run.execution.sends_once or link.name != "network":
        return copies
    hosts = expert_devices(run) / link.inner
    return hosts * (1 - (1 - 1 / hosts) ** copies)


def _expert_by_host(run: Run, rows: int, hosts: int, tokens: int) -> Iterator[Row]:
    """Rows of tokens sent once to each host (`parallel.expert.host_exchange`).

    Args:
        run: The run.
        rows: Rows that a device receives.
        hosts: Hosts of the devices that share the experts.
        tokens: Tokens of a device to each host.
    """
    row_bytes = run.workload.hidden * run.dtype_bytes
    per_host = run.layout.expert // hosts
    picks = hosts * tokens * run.workload.top_k * PICK_BYTES
    share = 1.0 if round_parts(run) > 1 else 0.0

    def move(passes: str, reason: str, again: str = "") -> Iterator[Row]:
        axes = ("expert",)
        between = Row(axes, "collective-permute", tokens * row_bytes, reason, passes)
        yield between._replace(times=hosts - 1, share=share, again=again)
        inside = Row(axes, "all-to-all", rows * row_bytes, reason, passes, again=again)
        yield inside._replace(members=per_host, part="inner", share=share)

    def numbers(payload: float, passes: str, again: str = "") -> Row:
        # Which rows are sent depends on them.
        one = Row(("expert",), "all-to-all", payload, _NUMBERS, passes)
        return one._replace(share=0.0, again=again)

    for passes, again in (("forward", ""), ("backward", "exchanges")):
        yield from move(passes, _THERE, again)
        yield numbers(rows * ROUTE_BYTES, passes, again)
        across = numbers(picks, passes, again)
        yield across._replace(members=hosts, part="outer")
    yield from move("forward", _BACK)
    yield from move("backward", _THERE)
    yield from move("backward", _BACK)
    yield numbers(rows * WEIGHT_BYTES, "backward")


_NUMBERS = "numbers of rows to and from their experts"
_THERE, _BACK = "tokens to their experts", "and back from their experts"


def weight_rows(run: Run, *, moe: bool) -> Rows:
    """Return the rows of one block's weights, where each use gathers them (ZeRO-3)."""
    if run.state_shards == 1 or run.layout.zero < 3 or run.gathers_once:
        return ()
    again, rows = recomputation(run, moe=moe), []
    twice = run.execution.gathers_again and again.up
    routed: float = run.workload.expert_parameters(moe=moe)
    routed /= run.layout.expert * run.layout.tensor
    for axes, values in by_axes(run, block_parameters(run, moe=moe), routed):
        gathered, reduced = split_bytes(run, values)
        gather = Row(
            axes, "all-gather", gathered, PARAMETERS, "forward", hidden_by=LAYER
        )
        back = gather._replace(passes="backward", times=2 if twice else 1)
        passes = "weight_grad" if run.splits_backward else "backward"
        waits = run.execution.waits_for_scatters == run.cluster.device.platform
        hidden_by = "" if waits else LAYER
        scatter = Row(axes, "reduce-scatter", reduced, OF_THEM, passes)
        rows += [gather, back, scatter._replace(hidden_by=hidden_by)]
    return between_devices(run, rows)


def by_axes(
    run: Run, parameters: float, routed: float
) -> list[tuple[tuple[str, ...], float]]:
    """Return numbers of parameters by the mesh axes that ZeRO splits them over.

    Those of experts have axes of their own where `expert` is one of ZeRO's: they lie
    over it already.
    """
    axes = run.layout.split_axes
    if axes == run.routed_axes:
        return [(axes, parameters)]
    return [(axes, parameters - routed), (run.routed_axes, routed)]


PARAMETERS, OF_THEM = "parameters", "gradients of them"


def split_bytes(run: Run, parameters: float) -> tuple[float, float]:
    """Return the bytes of whole parameters as used, and of their gradients."""
    return parameters * run.gathered_bytes, parameters * run.execution.reduction_bytes


def end_rows(run: Run) -> Rows:
    """Return the rows of embedding and head, for one microbatch.

    Where all ranks share them, each has a share of the tokens of every microbatch that
    enters or leaves.
    """
    ranks = run.layout.stage if run.execution.shared_ends else 1
    rows = [*_vocabulary(run, ranks)]
    if ranks > 1:
        own = run.residual_bytes * run.residual_share
        reason = "tokens of embedding and head, shared by all ranks"
        gather = Row(("stage",), "all-gather", own, reason, "forward")
        scatter = Row(("stage",), "reduce-scatter", own, reason, "head")
        rows += [gather, gather._replace(passes="head")]
        rows += [scatter, scatter._replace(passes="backward")]
    if scatters_ends_each_tick(run):
        rows += _scattered_ends(run)
    return between_devices(run, rows)


def _scattered_ends(run: Run) -> Iterator[Row]:
    """Rows of the gradients that a head and an embedding's backward add in a tick."""
    workload, axes = run.workload, run.layout.split_axes
    embedding, head = workload.embedding_parameters, workload.head_parameters
    if workload.tied:
        head = workload.vocab * workload.hidden
    for values, passes in ((head, "head"), (embedding, "backward")):
        own = values / run.layout.tensor
        own += workload.final_norm_parameters if passes == "head" else 0
        reduced = split_bytes(run, own)[1]
        yield Row(axes, "reduce-scatter", reduced, OF_THEM, passes)


def _vocabulary(run: Run, ranks: int) -> Iterator[Row]:
    """Rows of embedding and head whose vocabulary is split over `tensor`."""
    if run.workload.modulations:
        return  # of patches it has all
    share, tokens = run.residual_bytes / ranks, run.tokens / ranks
    split = run.layout.sequence_parallel
    one = Row(("tensor",), "all-reduce", share, _SUMS, "forward")
    yield one._replace(reason="embedding rows") if split else one
    # The gradient of the head's input. Of a split sequence its two halves are counted,
    # and taken to last as long as the sum that they are together; the time to gather
    # the gradient of the embedding's rows is left out.
    yield one._replace(passes="head", only=SECONDS if split else "")
    if split:
        for kind, passes in (
            ("all-gather", "head"),
            ("reduce-scatter", "head"),
            ("all-gather", "backward"),
        ):
            reason = _OF_SEQUENCE[kind]
            yield Row(("tensor",), kind, share, reason, passes, only=BYTES)
    # Of each token in fp32: largest logit, sum of exponentials, its target's logit.
    # They take next to no time.
    reason = "loss over a split vocabulary"
    yield Row(("tensor",), "all-reduce", 3 * 4 * tokens, reason, "head", only=BYTES)


def scatters_ends_each_tick(run: Run) -> bool:
    """Return True if a tick scatters what it adds to the ends' gradients."""
    layout = run.layout
    split = layout.zero == 3 and run.state_shards > 1 and not run.gathers_once
    return run.execution.lock_step and layout.runs_in_ticks and split


def hop_rows(run: Run) -> Rows:
    """Return the rows of a microbatch's hops: activations up, gradients down."""
    if run.layout.stage == 1:
        return ()
    own, tensor = run.residual_bytes * run.residual_share, run.layout.tensor
    reason = "activations up, gradients down"
    # In lock step every rank sends in each way, with something to send or not.
    ways = hop_ways(run.layout) if run.execution.lock_step else 1
    up = Row(("stage",), "collective-permute", own, reason, "up", ways)
    rows = [up]
    if run.execution.hop_split and not run.layout.sequence_parallel and tensor > 1:
        # Each device sends its part, and gathers the others'; counted as one.
        part = up._replace(payload_bytes=own / tensor, only=SECONDS)
        gather = Row(("tensor",), "all-gather", own, reason, "up", only=SECONDS)
        rows = [up._replace(only=BYTES), part, gather._replace(waits_on="stage")]
    return between_devices(run, [*rows, *(row._replace(passes="down") for row in rows)])


def hop_ways(layout: Layout) -> int:
    """Return the number of ways in which a tick's activations hop: two in a V."""
    ranks, stages_of = layout.stage, SCHEDULES[layout.schedule].stages_of
    rank_of = {
        stage: rank
        for rank in range(ranks)
        for stage in stages_of(rank, ranks, layout.chunks)
    }
    ways = {(rank_of[s + 1] - rank_of[s]) % ranks for s in range(len(rank_of) - 1)}
    return len(ways - {0})


def between_devices(run: Run, rows: Iterable[Row]) -> Rows:
    """Return the rows over mesh axes of several devices, with what hides them."""
    layout, kept = run.layout, []
    condition = overlap_condition(layout, in_parts=run.num_parts > 1)
    for row in rows:
        axes = tuple(axis for axis in row.mesh_axes if getattr(layout, axis) > 1)
        if axes and row.times:
            one = row if axes == row.mesh_axes else row._replace(mesh_axes=axes)
            kept.append(_as_measured(run, one, condition))
    return tuple(kept)


def _as_measured(run: Run, row: Row, condition: Condition) -> Row:
    """Row with the share that compiled programs hide, if the execution uses it."""
    once = row.passes == "once"
    ahead = row.hidden_by in (LAYER, LAST_BACKWARD, NEXT_FORWARD)
    if not run.execution.measured_overlap or (once and not ahead):
        return row
    late = row.hidden_by == LAST_BACKWARD and run.reduces_in_last_microbatch
    if ahead and not (run.prefetches or late):
        return row._replace(share=0.0)
    platform = run.cluster.device.platform
    share = hidden_share(condition, platform, row.mesh_axes, row.kind, row.part)
    hidden_by = row.hidden_by or MATMULS
    return row._replace(hidden_by=hidden_by, share=min(row.share, share))


_GRADIENT_BYTES = 4
"""Bytes of a value of the gradients of keys and values, which are summed in fp32."""


def context_rows(run: Run) -> Rows:
    """Return the rows over `context` of one block's attention, nothing recomputed."""
    return repeated(between_devices(run, _context(run)), Again())


def _context(run: Run) -> Iterator[Row]:
    how = run.layout.attention_method
    workload, tensor = run.workload, run.layout.tensor
    sizes = workload.query_dim + workload.value_dim
    head_bytes = run.tokens * sizes * run.dtype_bytes / tensor
    keys_values = workload.kv_heads * head_bytes
    if how.heads > 1:
        keys_values = _kv_heads_sent(run) * head_bytes * tensor
        sent = keys_values + workload.heads * head_bytes
        one = _row(run, "all-to-all", sent, "heads for sequence, and back", "inner")
        # Queries, keys and values there, mixed values back; gradients the other way.
        yield from _each_pass(one, "trades")
    if how.heads == 1 or how.groups > 1:
        yield from _between_groups(run, keys_values)


def _kv_heads_sent(run: Run) -> int:
    """Number of key/value heads that a device sends; all heads where they are odd."""
    workload, layout = run.workload, run.layout
    heads, kv_heads = (n // layout.tensor for n in (workload.heads, workload.kv_heads))
    if workload.kv_heads % layout.tensor or heads % layout.attention_method.heads:
        return heads
    return kv_heads * head_copies(heads, kv_heads, layout.attention_method.heads)


def _between_groups(run: Run, keys_values: float) -> Iterator[Row]:
    """Rows of keys and values sent to devices with other tokens of the same heads."""
    groups = run.layout.attention_method.groups
    gradients = keys_values * _GRADIENT_BYTES / run.dtype_bytes
    if run.layout.attention_method.across.gathers:
        reason = "keys and values of the whole sequence"
        one = _row(run, "all-gather", keys_values * groups, reason, "outer")
        # Back, they are gathered again, and their gradients scattered.
        back = one._replace(kind="reduce-scatter", payload_bytes=gradients * groups)
        yield from _each_pass(one, "attention", back)
        return
    reason = "keys and values around the ring"
    one = _row(run, "collective-permute", keys_values, reason, "outer")
    # One part moves while another is attended to; back, gradients of the parts before
    # move with it, and once more, to where they belong.
    one = one._replace(times=groups - 1, hidden_by=ATTENTION)
    back = one._replace(passes="backward")
    of_keys = back._replace(payload_bytes=gradients)
    yield from (one, back, of_keys, of_keys._replace(times=1, hidden_by=""))
    yield back._replace(again="attention", hidden_by=ATTENTION_AGAIN)


def _row(run: Run, kind: str, payload: float, reason: str, part: str) -> Row:
    """Row of a forward, over the part of `context` that takes part."""
    one = Row(("context",), kind, payload, reason, "forward")
    how = run.layout.attention_method
    if min(how.heads, how.groups) == 1:
        return one
    return one._replace(part=part, members=how.heads if part == "inner" else how.groups)


def _each_pass(one: Row, again: str, back: Row | None = None) -> Iterator[Row]:
    """Rows of a forward, of its backward, and of what that recomputes."""
    yield one
    yield one._replace(passes="backward")
    if back is not None:
        yield back._replace(passes="backward")
    yield one._replace(passes="backward", again=again)
