"""The arrays that a program is given: new tokens of each row, and where they belong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshpar.generation.cache_plan import CachePlan
from meshpar.generation.requests import Running
from meshpar.parallel.paged_cache import Rows, Source

_LEAST_CHUNK = 16


def given_rows(
    plan: CachePlan, running: Sequence[Running | None], num_tokens: int
) -> tuple[np.ndarray, Rows]:
    """(rows, tokens) int32, and the rows.

    Args:
        plan: Of the cache.
        running: The request of each row; None where it rests.
        num_tokens: Most new tokens of each.
    """
    tokens = np.zeros((len(running), num_tokens), np.int32)
    tables = np.zeros((len(running), plan.table_pages), np.int32)
    slots, starts, counts = np.zeros((3, len(running)), np.int32)
    of_shard = plan.slots // plan.layout.batch_shards
    for at, one in enumerate(running):
        if one is None:
            continue
        count = min(num_tokens, one.num_unwritten)
        starts[at], counts[at], slots[at] = one.written, count, one.slot % of_shard
        tokens[at, :count] = one.tokens[one.written : one.written + count]
        tables[at, : len(one.pages)] = one.pages
    source = _source(plan, running) if plan.max_source else None
    return tokens, Rows(tables, slots, starts, counts, source)


def _source(plan: CachePlan, running: Sequence[Running | None]) -> Source:
    """What encoders are to read now."""
    unread = [() if one is None else one.unread for one in running]
    longest = max(map(len, unread))
    width = min(rounded(longest), plan.max_source) if longest else 0
    tokens = np.zeros((len(running), width), np.int32)
    for row, new in zip(tokens, unread, strict=True):
        row[: len(new)] = new
    lengths = [0 if one is None else len(one.request.source) for one in running]
    counts = np.array(list(map(len, unread)), np.int32)
    return Source(tokens, counts, np.array(lengths, np.int32))


def rounded(num_tokens: int) -> int:
    """A few sizes for all prompts, so that few programs are compiled.

    Example:
        >>> rounded(1), rounded(2), rounded(17)
        (1, 16, 32)
    """
    if num_tokens == 1:
        return 1
    size = _LEAST_CHUNK
    while size < num_tokens:
        size *= 2
    return size
