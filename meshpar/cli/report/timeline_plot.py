"""A timeline as a plot in a page, drawn by plotly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.cli.report.page import page, paragraph, plot
from meshpar.cli.report.timeline_parts import (
    PHASE_ROW,
    Kind,
    TimelineParts,
    timeline_parts,
)
from meshpar.schedules.render import summary
from meshpar.schedules.simulate import Timeline

if TYPE_CHECKING:
    from plotly.graph_objects import Bar, Figure

# Pixels.
_UNIT_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 20, 640, 8000
_TICK_WIDTH, _MOST_COUNT_TICKS = 100, 6
_ROW_HEIGHT, _COUNTS_HEIGHT, _GAP, _TOP, _BOTTOM = 26, 170, 20, 50, 70
_FONT_SIZE = 10

HOW_TO_READ = (
    "Numbers are microbatches; point at a bar for its times, scroll sideways where the "
    "plot is wider than the window."
)


def timeline_page(timeline: Timeline) -> str:
    """A page of one timeline."""
    title = f"Pipeline schedule {timeline.schedule.name}"
    text = f"{summary(timeline)}. {HOW_TO_READ}"
    return page(title, [paragraph(text), timeline_plot(timeline)])


def timeline_plot(timeline: Timeline) -> str:
    """The plot: a row a rank, phases above, what is in flight below."""
    from plotly.subplots import make_subplots

    parts = timeline_parts(timeline)
    rows_height = _ROW_HEIGHT * (len(parts.counts) + 1)
    height = rows_height + _GAP + _COUNTS_HEIGHT
    figure = make_subplots(
        rows=2,
        shared_xaxes=True,
        row_heights=[rows_height, _COUNTS_HEIGHT],
        vertical_spacing=_GAP / height,
    )
    _add_rows(figure, parts)
    _add_counts(figure, parts)
    for start in parts.changes:
        line = {"dash": "dash", "color": "#666666", "width": 1}
        figure.add_vline(start, line=line, layer="below")
    figure.update_layout(
        height=height + _TOP + _BOTTOM,
        margin={"l": 70, "r": 20, "t": _TOP, "b": _BOTTOM},
        template="plotly_white",
        barmode="overlay",
        bargap=0.12,
        uniformtext={"minsize": _FONT_SIZE, "mode": "hide"},
        legend=_legend(y=1, yanchor="top"),
        legend2=_legend(y=0, yanchor="bottom"),
    )
    width = min(max(_LEAST_WIDTH, round(_UNIT_WIDTH * parts.num_units)), _MOST_WIDTH)
    figure.update_xaxes(nticks=width // _TICK_WIDTH, ticklabelstandoff=8)
    figure.update_yaxes(ticklabelstandoff=6)
    return plot(figure, min_width=width)


def _legend(**place: object) -> dict[str, object]:
    return {"orientation": "h", "x": 0, "yref": "container", **place}


def _add_rows(figure: Figure, parts: TimelineParts) -> None:
    for kind in parts.kinds:
        figure.add_trace(_bars(kind), row=1, col=1)
    figure.add_trace(_bars(parts.phases).update(showlegend=False), row=1, col=1)
    figure.update_yaxes(
        row=1,
        range=[len(parts.counts) - 0.4, PHASE_ROW - 0.6],
        tickvals=[*parts.row_names],
        ticktext=[*parts.row_names.values()],
        showgrid=False,
        zeroline=False,
    )


def _bars(kind: Kind) -> Bar:
    from plotly.graph_objects import Bar

    return Bar(
        orientation="h",
        y=[bar.row for bar in kind.bars],
        base=[bar.start for bar in kind.bars],
        x=[bar.length for bar in kind.bars],
        text=[bar.text for bar in kind.bars],
        hovertext=[bar.hover for bar in kind.bars],
        hoverinfo="text",
        name=kind.name,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": "black", "size": _FONT_SIZE},
        marker={"color": kind.color, "line": {"color": "white", "width": 1}},
    )


def _add_counts(figure: Figure, parts: TimelineParts) -> None:
    from plotly.colors import sample_colorscale
    from plotly.graph_objects import Scatter

    ranks = range(len(parts.counts))
    colors = sample_colorscale("Viridis", [parts.shade(rank) for rank in ranks])
    for rank, counts in enumerate(parts.counts):
        figure.add_trace(
            Scatter(
                x=[count.since_s for count in counts],
                y=[count.number for count in counts],
                mode="lines",
                line={"shape": "hv", "color": colors[rank]},
                name=f"rank {rank}",
                legend="legend2",
                showlegend=rank in parts.named_ranks,
                hovertemplate=f"rank {rank}: %{{y}} in flight from %{{x:.4g}} "
                f"{parts.unit}<extra></extra>",
            ),
            row=2,
            col=1,
        )
    most = max(number for counts in parts.counts for _, number in counts)
    every = -(-most // _MOST_COUNT_TICKS)
    figure.update_yaxes(row=2, title="in flight", rangemode="tozero", dtick=every)
    # Each tick has the unit: a title could be out of sight where the plot is wide.
    figure.update_xaxes(ticksuffix=f" {parts.unit}", range=[0, parts.end or 1])
