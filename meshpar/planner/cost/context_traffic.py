"""What attention sends over `context`: the same for time and bytes."""

from __future__ import annotations

from typing import NamedTuple

from meshpar.planner.cost.run import Run
from meshpar.planner.machine.collective_cost import all_gather_s, all_to_all_s, send_s


class ContextTraffic(NamedTuple):
    """Collectives of one block and microbatch.

    Args:
        kind: As XLA calls it.
        payload_bytes: Of one pass: the whole array, or all that a device sends.
        seconds: One pass takes.
        backward_passes: Passes of a backward; a forward has one.
        reason: What it is for.
    """

    kind: str
    payload_bytes: float
    seconds: float
    backward_passes: int
    reason: str


def context_traffic(run: Run) -> ContextTraffic:
    """The traffic of the layout's way to attend over `context`."""
    context, workload = run.layout.context, run.workload
    link = run.link("context")
    sizes = workload.query_dim + workload.value_dim
    head_bytes = run.tokens * sizes * run.dtype_bytes / run.layout.tensor
    keys_values = workload.kv_heads * head_bytes
    if run.layout.attention == "ring":
        # Back, their gradients travel with them.
        moved = (context - 1) * keys_values
        seconds = (context - 1) * send_s(keys_values, link)
        reason = "keys and values around the ring"
        return ContextTraffic("collective-permute", moved, seconds, 2, reason)
    if run.layout.attention == "allgather":
        # Back, they are gathered again, and their gradients scattered.
        whole = keys_values * context
        seconds = all_gather_s(whole, context, link)
        reason = "keys and values of the whole sequence"
        return ContextTraffic("all-gather", whole, seconds, 2, reason)
    # Queries, keys and values there, mixed values back; gradients the other way.
    moved = keys_values + workload.heads * head_bytes
    seconds = all_to_all_s(moved, context, link)
    return ContextTraffic(
        "all-to-all", moved, seconds, 1, "heads for sequence, and back"
    )
