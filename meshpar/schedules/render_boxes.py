"""A timeline as coloured boxes: what the SVG and the PNG both draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshpar.schedules.base import Action, Op
from meshpar.schedules.simulate import Timeline

ROW_HEIGHT = 24
MARGIN = 48
MIN_BOX_WIDTH, MAX_WIDTH = 26, 4000

# Two shades each, by chunk: colours that colour-blind readers tell apart (Okabe, Ito).
_SHADES = {
    Op.F: ((86, 180, 233), (0, 114, 178)),
    Op.B: ((240, 200, 90), (230, 159, 0)),
    Op.I: ((240, 200, 90), (230, 159, 0)),
    Op.W: ((120, 200, 170), (0, 158, 115)),
}


class Box(NamedTuple):
    """A rectangle in pixels and the action it stands for."""

    x: float
    y: float
    width: float
    height: int
    color: tuple[int, int, int]
    action: Action


def picture_size(timeline: Timeline) -> tuple[int, int]:
    """Width and height in pixels."""
    width = 2 * MARGIN + float(timeline.end_s) * pixels_per_s(timeline)
    return round(width), 2 * MARGIN + ROW_HEIGHT * len(timeline.events)


def boxes(timeline: Timeline) -> Iterator[Box]:
    """The box of every action that takes time, rank by rank."""
    scale = pixels_per_s(timeline)
    chunk_of_stage = {
        stage: chunk
        for stages in timeline.schedule.stages_of_rank
        for chunk, stage in enumerate(stages)
    }
    for rank, events in enumerate(timeline.events):
        for action, start_s, end_s in events:
            yield Box(
                x=MARGIN + float(start_s) * scale,
                y=row_y(rank),
                width=float(end_s - start_s) * scale,
                height=ROW_HEIGHT - 2,
                color=_SHADES[action.op][chunk_of_stage[action.stage] % 2],
                action=action,
            )


def row_y(rank: int) -> int:
    """The top of a rank's row."""
    return MARGIN + ROW_HEIGHT * rank


def pixels_per_s(timeline: Timeline) -> float:
    """The scale at which the shortest action has room for its number, if it can."""
    times_s = (
        float(event.end_s - event.start_s)
        for events in timeline.events
        for event in events
    )
    shortest_s = min((time_s for time_s in times_s if time_s > 0), default=1.0)
    end_s = float(timeline.end_s) or 1.0
    return min(MIN_BOX_WIDTH / shortest_s, (MAX_WIDTH - 2 * MARGIN) / end_s)
