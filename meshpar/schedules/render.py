"""A timeline as lines of text, a row a rank, as HTML, or as Chrome trace events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshpar.html import Bar, element, lanes
from meshpar.schedules.base import OP_WORDS

if TYPE_CHECKING:
    from meshpar.schedules.simulate import Event, Timeline

_MOST_DRAWN = 500
"""Actions of a rank that `timeline_html` draws, the first."""

_IDLE = "."


def summary(timeline: Timeline) -> str:
    """Return the schedule, its sizes, span and bubble, in one line."""
    schedule = timeline.schedule
    return (
        f"{schedule.name}: stages={schedule.num_ranks}, chunks={schedule.num_chunks}, "
        f"microbatches={schedule.num_microbatches}: span "
        f"{float(timeline.span_s) * 1e3:g} ms, bubble {timeline.bubble_fraction:.2%}"
    )


def ascii_timeline(timeline: Timeline, *, max_width: int = 160) -> str:
    """Return the timeline as text, to scale, with idle time as dots.

    An action is written as `2F0` and filled up with its letter; where `max_width` does
    not leave room for names, the letters stand alone.

    Example:
        >>> from meshpar.schedules import make_schedule, simulate
        >>> print(ascii_timeline(simulate(make_schedule("1f1b", 2, 2))))
        rank 0 |0F0 0F1 ........0B0BBBB ....0B1BBBB |
        rank 1 |....1F0 1B0BBBB 1F1 1B1BBBB ........|
    """
    end_s = float(timeline.end_s) or 1.0
    labels = [f"rank {rank} |" for rank in range(len(timeline.events))]
    room = max(1, max_width - len(labels[-1]) - 1)
    num_columns = min(room, round(_columns_per_s(timeline) * end_s))
    return "\n".join(
        f"{label:>{len(labels[-1])}}{_row(events, num_columns, end_s)}|"
        for label, events in zip(labels, timeline.events, strict=True)
    )


def _columns_per_s(timeline: Timeline) -> float:
    """Return the scale at which the shortest action has room for its name."""
    return max(
        (
            (len(str(event.action)) + 1) / float(event.end_s - event.start_s)
            for events in timeline.events
            for event in events
            if event.end_s > event.start_s
        ),
        default=1.0,
    )


def _row(events: Sequence[Event], num_columns: int, end_s: float) -> str:
    row = [_IDLE] * num_columns
    for action, start_s, stop_s in events:
        start, stop = (
            round(float(time_s) / end_s * num_columns) for time_s in (start_s, stop_s)
        )
        name, width = str(action), stop - start
        text = str(action.op) * width
        if width > len(name):
            text = name + text[len(name) : -1] + " "
        row[start:stop] = text
    return "".join(row)


def timeline_html(timeline: Timeline) -> str:
    """Return lanes of bars, one a rank; numbers are microbatches."""
    rows = {
        f"rank {rank}": [
            Bar(
                start=float(start_s),
                end=float(end_s),
                text=str(action.microbatch),
                kind=OP_WORDS[action.op],
                hover=f"{action}: {float(start_s):.4g} to {float(end_s):.4g} s",
            )
            for action, start_s, end_s in events[:_MOST_DRAWN]
        ]
        for rank, events in enumerate(timeline.events)
    }
    drawn = lanes(rows, [*OP_WORDS.values()], "s")
    return element(f"Timeline of {summary(timeline)}", [drawn])


def trace_events(timeline: Timeline) -> dict:
    """Return a trace for Perfetto as JSON: a thread a rank, an event an action.

    Reference: "Trace Event Format", Google, 2016: complete events (`X`), microseconds.
    """
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
            "cat": OP_WORDS[action.op].replace(" ", "_"),
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
