"""Traffic over `context`: what attention of one block sends, by the layout's method."""

from __future__ import annotations

from collections.abc import Iterator

from meshpar.attention_tiles import copies_of_heads
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.traffic_row import ATTENTION, ATTENTION_AGAIN, Row
from meshpar.planner.workload.recomputation import Again

_GRADIENT_BYTES = 4
"""Of keys and values on their way: they are added up in fp32."""


def context_rows(run: Run, again: Again | None = None) -> Iterator[Row]:
    """Of one block.

    Args:
        run: The run.
        again: What its backward recomputes; nothing when absent.
    """
    again, how = again or Again(), run.layout.attention_method
    workload, tensor = run.workload, run.layout.tensor
    sizes = workload.query_dim + workload.value_dim
    head_bytes = run.tokens * sizes * run.dtype_bytes / tensor
    keys_values = workload.kv_heads * head_bytes
    if how.heads > 1:
        keys_values = _kv_heads_sent(run) * head_bytes * tensor
        sent = keys_values + workload.heads * head_bytes
        one = _row(run, "all-to-all", sent, "heads for sequence, and back", "inner")
        # Queries, keys and values there, mixed values back; gradients the other way.
        yield from _each_pass(one, again.attention)
    if how.heads == 1 or how.groups > 1:
        yield from _between_groups(run, keys_values, again)


def _kv_heads_sent(run: Run) -> int:
    """Of a device, to those that it trades with; all that a query has where odd."""
    workload, layout = run.workload, run.layout
    heads, kv_heads = (n // layout.tensor for n in (workload.heads, workload.kv_heads))
    if workload.kv_heads % layout.tensor or heads % layout.attention_method.heads:
        return heads
    return kv_heads * copies_of_heads(heads, kv_heads, layout.attention_method.heads)


def _between_groups(run: Run, keys_values: float, again: Again) -> Iterator[Row]:
    """Keys and values of a device, to those with other tokens of the same heads."""
    groups = run.layout.attention_method.groups
    gradients = keys_values * _GRADIENT_BYTES / run.dtype_bytes
    if run.layout.attention_method.across == "allgather":
        reason = "keys and values of the whole sequence"
        one = _row(run, "all-gather", keys_values * groups, reason, "outer")
        # Back, they are gathered again, and their gradients scattered.
        back = one._replace(kind="reduce-scatter", payload_bytes=gradients * groups)
        yield from _each_pass(one, again.attention, back)
        return
    reason = "keys and values around the ring"
    one = _row(run, "collective-permute", keys_values, reason, "outer")
    # One part moves while another is attended to; back, gradients move with it, and
    # once more, to where they belong.
    back = one._replace(payload_bytes=gradients, times=groups)
    one = one._replace(times=groups - 1, beside=ATTENTION)
    yield from _each_pass(one, again.attention, back)


def _row(run: Run, kind: str, payload: float, reason: str, part: str) -> Row:
    """One row of a forward; of a part of the mesh axis where it has two."""
    one = Row(("context",), kind, payload, reason, "forward")
    how = run.layout.attention_method
    if min(how.heads, how.groups) == 1:
        return one
    return one._replace(part=part, members=how.heads if part == "inner" else how.groups)


def _each_pass(one: Row, again: int, back: Row | None = None) -> Iterator[Row]:
    """A forward's row, its backward's, and what that does besides."""
    yield one
    yield one._replace(passes="backward", beside="")
    if back is not None:
        yield back._replace(passes="backward", beside="")
    beside = ATTENTION_AGAIN if one.beside else ""
    yield one._replace(passes="backward", times=again * one.times, beside=beside)
