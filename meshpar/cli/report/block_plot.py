"""A block's matmuls and collectives over time, a row for each mesh axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.audit.overlap import COMPUTE, BlockTimeline, Span

if TYPE_CHECKING:
    from plotly.graph_objects import Bar, Figure

_ROW_HEIGHT, _AROUND = 48, 130
_COLORS = {"matmuls": "#8ec9f0", "hidden": "#9fdcc4", "exposed": "#e8a088"}


def block_plot(found: BlockTimeline) -> Figure:
    """The rows, matmuls at the top; in each the parts that are hidden and exposed."""
    from plotly.graph_objects import Figure

    rows = list(dict.fromkeys([COMPUTE, *(span.row for span in found.spans)]))
    kinds = {
        kind: [span for span in found.spans if _kind(span) == kind] for kind in _COLORS
    }
    figure = Figure([_bars(kind, spans) for kind, spans in kinds.items() if spans])
    figure.update_layout(
        height=_AROUND + _ROW_HEIGHT * len(rows),
        margin={"l": 10, "r": 20, "t": 40, "b": 60},
        template="plotly_white",
        barmode="overlay",
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
    )
    figure.update_xaxes(title="time in the block, ms", rangemode="tozero")
    figure.update_yaxes(categoryarray=rows[::-1], categoryorder="array")
    figure.update_yaxes(automargin=True, ticklabelstandoff=6)
    return figure


def _kind(span: Span) -> str:
    if span.row == COMPUTE:
        return "matmuls"
    return "exposed" if span.is_exposed else "hidden"


def _bars(kind: str, spans: list[Span]) -> Bar:
    from plotly.graph_objects import Bar

    return Bar(
        orientation="h",
        name=kind,
        y=[span.row for span in spans],
        base=[span.start_s * 1e3 for span in spans],
        x=[(span.end_s - span.start_s) * 1e3 for span in spans],
        hovertext=[
            f"<b>{span.name}</b><br>{span.start_s * 1e3:.3f} to "
            f"{span.end_s * 1e3:.3f} ms, {kind}"
            for span in spans
        ],
        hoverinfo="text",
        marker={"color": _COLORS[kind], "line": {"color": "white", "width": 1}},
    )
