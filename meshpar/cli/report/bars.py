"""Bars that lie on one another, a row for each thing and a colour for each kind."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from plotly.graph_objects import Bar, Figure

# Pixels.
_ROW_HEIGHT, _NAME_HEIGHT, _BELOW, _PADDING, _FONT_SIZE = 34, 14, 60, 40, 11

_LEGEND = {
    "orientation": "h",
    "traceorder": "normal",
    "maxheight": 400,
    "x": 0,
    "y": 1,
    "yanchor": "bottom",
}

# Black is read on all of them.
_COLORS = ("#8ec9f0", "#f7c77a", "#9fdcc4", "#e9b3d3", "#d6d27a", "#c7c7c7", "#e8a088")


class Part(NamedTuple):
    """A part of a row's bar.

    Args:
        row: What the row is called.
        kind: What the legend calls the part.
        num_bytes: How long it is.
        hover: What pointing at it says.
    """

    row: str
    kind: str
    num_bytes: float
    hover: str


def stacked_bars(parts: list[Part], *, title: str, limit: tuple[float, str]) -> Figure:
    """The bars, the first row at the top, each part with its bytes where they fit.

    Args:
        parts: Of all rows; parts of a row in the order in which they lie.
        title: What is counted; its unit follows.
        limit: Bytes to draw a line at, and its name; (0, "") for none.
    """
    from plotly.graph_objects import Figure

    unit, size = _unit(max([limit[0], *(part.num_bytes for part in parts)]))
    rows = list(dict.fromkeys(part.row for part in parts))
    kinds = list(dict.fromkeys(part.kind for part in parts))
    figure = Figure(
        [
            _bar([part for part in parts if part.kind == kind], color, size)
            for kind, color in zip(kinds, cycle(_COLORS), strict=False)
        ]
    )
    if limit[1]:
        _add_limit(figure, limit[0] / size, limit[1])
    # Names stand beside each other where there is width; else the rows give way.
    names = _NAME_HEIGHT * (len(kinds) + bool(limit[1]))
    figure.update_layout(
        height=names + _PADDING + _ROW_HEIGHT * len(rows) + _BELOW,
        margin={"l": 10, "r": 20, "t": _PADDING, "b": _BELOW},
        template="plotly_white",
        barmode="stack",
        showlegend=True,
        legend=_LEGEND,
        uniformtext={"minsize": _FONT_SIZE, "mode": "hide"},
    )
    figure.update_xaxes(title=f"{title}, {unit}", rangemode="tozero", tickangle=0)
    figure.update_yaxes(categoryarray=rows[::-1], categoryorder="array")
    figure.update_yaxes(automargin=True, ticklabelstandoff=6)
    return figure


def _bar(parts: list[Part], color: str, size: float) -> Bar:
    """The parts of one kind, in units of `size` bytes."""
    from plotly.graph_objects import Bar

    return Bar(
        orientation="h",
        name=parts[0].kind,
        y=[part.row for part in parts],
        x=[part.num_bytes / size for part in parts],
        text=[f"{part.num_bytes / size:.3g}" for part in parts],
        hovertext=[part.hover for part in parts],
        hoverinfo="text",
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": "black", "size": _FONT_SIZE},
        marker={"color": color},
    )


def _unit(most_bytes: float) -> tuple[str, float]:
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next((one for one in units if most_bytes >= one[1]), units[-1])


def _add_limit(figure: Figure, at: float, name: str) -> None:
    """A line through all rows; a shape has no entry in the legend."""
    from plotly.graph_objects import Scatter

    line = {"color": "#b00020", "dash": "dash", "width": 2}
    figure.add_vline(at, line=line)
    figure.add_trace(Scatter(x=[None], y=[None], mode="lines", line=line, name=name))
