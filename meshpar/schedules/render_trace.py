"""A timeline as Chrome trace events, which Perfetto and chrome://tracing open.

Reference: "Trace Event Format", Google, 2016: complete events (`X`), microseconds.
"""

from __future__ import annotations

from meshpar.schedules.base import Op
from meshpar.schedules.simulate import Timeline

_CATEGORIES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input_grad",
    Op.W: "weight_grad",
}


def trace_events(timeline: Timeline) -> dict:
    """The JSON object: a thread a rank, an event an action."""
    names = [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": 0,
            "tid": rank,
            "args": {"name": f"rank {rank}"},
        }
        for rank in range(len(timeline.events))
    ]
    events = [
        {
            "name": str(action),
            "cat": _CATEGORIES[action.op],
            "ph": "X",
            "pid": 0,
            "tid": rank,
            "ts": float(start_s) * 1e6,
            "dur": float(end_s - start_s) * 1e6,
            "args": {"stage": action.stage, "microbatch": action.microbatch},
        }
        for rank, rank_events in enumerate(timeline.events)
        for action, start_s, end_s in rank_events
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + events}
