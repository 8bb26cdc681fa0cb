"""A timeline as a plot in a page, drawn by plotly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.cli.report.page import page, paragraph, plot
from meshpar.cli.report.timeline_parts import (
    PHASE_COLORS,
    PHASE_ROW,
    Bar,
    TimelineParts,
    timeline_parts,
)
from meshpar.schedules.render_text import summary
from meshpar.schedules.simulate import Timeline

if TYPE_CHECKING:
    from plotly.graph_objects import Bar as PlotlyBar
    from plotly.graph_objects import Figure

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
    for _, start, _ in parts.phases[1:]:
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
        figure.add_trace(
            _bars(
                rows=[bar.rank for bar in kind.bars],
                starts=[bar.start for bar in kind.bars],
                lengths=[bar.length for bar in kind.bars],
                texts=[str(bar.action.microbatch) for bar in kind.bars],
                hovers=[_hover(kind.name, bar, parts.unit) for bar in kind.bars],
                colors=kind.color,
                name=kind.name,
            ),
            row=1,
            col=1,
        )
    figure.add_trace(_phases(parts), row=1, col=1)
    ranks = range(len(parts.counts))
    figure.update_yaxes(
        row=1,
        range=[len(ranks) - 0.4, PHASE_ROW - 0.6],
        tickvals=[PHASE_ROW, *ranks],
        ticktext=["phase", *(f"rank {rank}" for rank in ranks)],
        showgrid=False,
        zeroline=False,
    )


def _bars(
    *,
    rows: list[int],
    starts: list[float],
    lengths: list[float],
    texts: list[str],
    hovers: list[str],
    colors: str | list[str],
    name: str,
) -> PlotlyBar:
    from plotly.graph_objects import Bar as PlotlyBar

    return PlotlyBar(
        orientation="h",
        y=rows,
        base=starts,
        x=lengths,
        text=texts,
        hovertext=hovers,
        hoverinfo="text",
        name=name,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": "black", "size": _FONT_SIZE},
        marker={"color": colors, "line": {"color": "white", "width": 1}},
    )


def _phases(parts: TimelineParts) -> PlotlyBar:
    trace = _bars(
        rows=[PHASE_ROW] * len(parts.phases),
        starts=[start for _, start, _ in parts.phases],
        lengths=[end - start for _, start, end in parts.phases],
        texts=[name for name, _, _ in parts.phases],
        hovers=[
            f"{name}: {start:.4g} to {end:.4g} {parts.unit}"
            for name, start, end in parts.phases
        ],
        colors=[PHASE_COLORS[name] for name, _, _ in parts.phases],
        name="phase",
    )
    trace.showlegend = False
    return trace


def _hover(name: str, bar: Bar, unit: str) -> str:
    stage, _, microbatch = bar.action
    return (
        f"<b>{bar.action}</b>: {name}<br>rank {bar.rank}, stage {stage}, microbatch "
        f"{microbatch}<br>{bar.start:.4g} to {bar.start + bar.length:.4g} {unit}"
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
