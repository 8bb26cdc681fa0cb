"""A timeline as a picture in a file, PNG or SVG, drawn by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshpar.cli.report.timeline_parts import (
    PHASE_ROW,
    Kind,
    TimelineParts,
    timeline_parts,
)
from meshpar.schedules.render import summary
from meshpar.schedules.simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Inches.
_UNIT_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 0.21, 9.0, 60.0
_ROW_HEIGHT, _COUNTS_HEIGHT, _REST_HEIGHT = 0.27, 1.8, 1.9
_DIGIT_WIDTH = 0.085
_FONT_SIZE = 8

_BOX_HEIGHT = 0.8  # of a row
_LABEL: dict[str, Any] = {
    "ha": "center",
    "va": "center",
    "fontsize": _FONT_SIZE,
    "in_layout": False,
}


def write_timeline_picture(timeline: Timeline, path: str | Path) -> None:
    """Writes the picture: a row a rank, phases above, what is in flight below.

    It grows with the timeline, up to 60 inches of width; microbatches' numbers that
    have no room are left out.
    """
    import matplotlib
    from matplotlib.figure import Figure

    parts = timeline_parts(timeline)
    rows_height = _ROW_HEIGHT * (len(parts.counts) + 1)
    width = min(max(_LEAST_WIDTH, _UNIT_WIDTH * parts.num_units), _MOST_WIDTH)
    height = rows_height + _COUNTS_HEIGHT + _REST_HEIGHT
    figure = Figure(figsize=(width, height), layout="constrained")
    rows, counts = figure.subplots(
        2, 1, sharex=True, height_ratios=[rows_height, _COUNTS_HEIGHT]
    )
    rows.set_title(summary(timeline), loc="left", fontsize=11)
    _draw_rows(rows, parts, inches_per_unit=(width - 1) / (parts.end or 1))
    _draw_counts(counts, parts, num_ticks=round(width))
    look: dict[str, Any] = {"ncols": 8, "fontsize": _FONT_SIZE, "frameon": False}
    figure.legend(*rows.get_legend_handles_labels(), loc="outside upper left", **look)
    figure.legend(*counts.get_legend_handles_labels(), loc="outside lower left", **look)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path, dpi=100)


def _draw_rows(axes: Axes, parts: TimelineParts, inches_per_unit: float) -> None:
    for kind in (*parts.kinds, parts.phases):
        _fill(axes, kind, None if kind is parts.phases else kind.name)
        for bar in kind.bars:
            if bar.length * inches_per_unit >= _DIGIT_WIDTH * len(bar.text):
                axes.text(bar.start + bar.length / 2, bar.row, bar.text, **_LABEL)
    axes.set_yticks([*parts.row_names], [*parts.row_names.values()])
    axes.set(ylim=(len(parts.counts) - 0.4, PHASE_ROW - 0.6), xlim=(0, parts.end or 1))
    _mark_phases(axes, parts)


def _fill(axes: Axes, kind: Kind, name: str | None) -> None:
    """The boxes of all bars at once: thousands of patches take minutes."""
    from matplotlib.collections import PolyCollection

    up, down = -_BOX_HEIGHT / 2, _BOX_HEIGHT / 2
    corners = [
        [
            (bar.start, bar.row + up),
            (bar.start + bar.length, bar.row + up),
            (bar.start + bar.length, bar.row + down),
            (bar.start, bar.row + down),
        ]
        for bar in kind.bars
    ]
    look: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5}
    look["facecolor"] = kind.color
    filled = PolyCollection(corners, label=name, gid=name, in_layout=False, **look)
    axes.add_collection(filled, autolim=False)


def _draw_counts(axes: Axes, parts: TimelineParts, num_ticks: int) -> None:
    import matplotlib
    from matplotlib.ticker import MaxNLocator

    colors = matplotlib.colormaps["viridis"]
    for rank, counts in enumerate(parts.counts):
        axes.step(
            [count.since_s for count in counts],
            [count.number for count in counts],
            where="post",
            color=colors(parts.shade(rank)),
            label=f"rank {rank}" if rank in parts.named_ranks else None,
        )
    axes.set(xlabel=f"time, {parts.unit}", ylabel="in flight", ylim=(0, None))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.locator_params(axis="x", nbins=num_ticks)
    _mark_phases(axes, parts)


def _mark_phases(axes: Axes, parts: TimelineParts) -> None:
    for start in parts.changes:
        axes.axvline(start, color="#666666", linewidth=0.8, linestyle="--", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
