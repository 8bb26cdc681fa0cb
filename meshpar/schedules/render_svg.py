"""A timeline as an SVG picture, alone or in a page of one file."""

from __future__ import annotations

from html import escape

from meshpar.schedules.render_boxes import (
    MARGIN,
    ROW_HEIGHT,
    Box,
    boxes,
    picture_size,
    row_y,
)
from meshpar.schedules.simulate import Timeline

_DIGIT_WIDTH = 7


def svg(timeline: Timeline) -> str:
    """The picture: a row a rank, a box an action, its microbatch written on it."""
    width, height = picture_size(timeline)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN - 16}">{escape(summary(timeline))}</text>',
    ]
    for rank in range(len(timeline.events)):
        y = row_y(rank) + ROW_HEIGHT // 2 + 3
        parts.append(f'<text x="4" y="{y}">rank {rank}</text>')
    parts.extend(map(_box, boxes(timeline)))
    return "\n".join([*parts, "</svg>", ""])


def html(timeline: Timeline) -> str:
    """A page that holds the picture and needs no other file."""
    title = escape(f"Pipeline schedule {timeline.schedule.name}")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f"<title>{title}</title></head>\n<body>\n<h1>{title}</h1>\n"
        f"{svg(timeline)}</body>\n</html>\n"
    )


def summary(timeline: Timeline) -> str:
    """The schedule, its sizes, span and bubble, in one line."""
    schedule = timeline.schedule
    return (
        f"{schedule.name}: stages={schedule.num_ranks}, chunks={schedule.num_chunks}, "
        f"microbatches={schedule.num_microbatches}: span "
        f"{float(timeline.span_s) * 1e3:g} ms, bubble {timeline.bubble_fraction:.2%}"
    )


def _box(box: Box) -> str:
    label = str(box.action.microbatch)
    color = "#{:02x}{:02x}{:02x}".format(*box.color)
    rectangle = (
        f'<rect x="{box.x:.2f}" y="{box.y}" width="{box.width:.2f}" '
        f'height="{box.height}" fill="{color}" stroke="white" stroke-width="0.5">'
        f"<title>{box.action}</title></rect>"
    )
    if box.width < _DIGIT_WIDTH * len(label):
        return rectangle
    x, y = box.x + box.width / 2, box.y + box.height / 2 + 4
    return f'{rectangle}<text x="{x:.2f}" y="{y}" text-anchor="middle">{label}</text>'
