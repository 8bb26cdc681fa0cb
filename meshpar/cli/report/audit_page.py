"""Page of `meshpar audit --html`: a block over time, overlap, collectives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from meshpar.audit.overlap import COMPUTE, BlockTimeline, Span
from meshpar.audit.report import AuditReport
from meshpar.audit.tables import collectives_html, overlap_html
from meshpar.html import heading, page, paragraph, plot

if TYPE_CHECKING:
    from plotly.graph_objects import Bar, Figure

_MIN_WIDTH = 640
_ROW_HEIGHT, _AROUND = 48, 130
_COLORS = {"matmuls": "#8ec9f0", "hidden": "#9fdcc4", "exposed": "#e8a088"}


def audit_page(report: AuditReport) -> str:
    """Return the text of the page."""
    parts = [paragraph(line) for line in (*_summary(report), *report.notes)]
    parts += [heading("Over time"), *_timelines(report)]
    parts += [heading("Hidden behind matmuls"), overlap_html(report)]
    parts += [heading("Collectives"), collectives_html(report)]
    if report.complaints():
        parts += [heading("To look at"), *map(paragraph, report.complaints())]
    return page(f"{report.layout} compiled for {report.target}", parts)


def _summary(report: AuditReport) -> Iterable[str]:
    if report.problem:
        yield report.problem
    if report.memory is not None:
        yield (
            f"A device holds {report.memory.peak_bytes:,} bytes at most, "
            f"{report.memory.temp_bytes:,} of them temporaries, and multiplies "
            f"{report.flops:.4g} FLOPs."
        )
    if report.compiler_options:
        names = [f"{name}={value}" for name, value in report.compiler_options.items()]
        yield f"Compiler options: {', '.join(names)}."


def _timelines(report: AuditReport) -> Iterable[str]:
    if not report.timelines:
        yield paragraph(
            "No loop over blocks, or no table of this device's speeds: seconds are not "
            "known."
        )
    for one in report.timelines:
        yield paragraph(_in_words(one))
        yield plot(_block_plot(one), min_width=_MIN_WIDTH)


def _in_words(one: BlockTimeline) -> str:
    exposed = sum(span.end_s - span.start_s for span in one.spans if span.is_exposed)
    return (
        f"{one.name.capitalize()} of a block, {one.executions:,} in a step: "
        f"{one.span_s * 1e3:.2f} ms by the table of devices and links, "
        f"{exposed * 1e3:.2f} ms of them waiting for collectives. What is no matmul "
        "takes no time here."
    )


def _block_plot(timeline: BlockTimeline) -> Figure:
    """Return a plot of a block over time: a row for matmuls, and one a mesh axis."""
    from plotly.graph_objects import Figure

    rows = list(dict.fromkeys([COMPUTE, *(span.row for span in timeline.spans)]))
    kinds: dict[str, list[Span]] = {kind: [] for kind in _COLORS}
    for span in timeline.spans:
        overlap = "exposed" if span.is_exposed else "hidden"
        kinds["matmuls" if span.row == COMPUTE else overlap].append(span)
    figure = Figure([_span_bars(kind, spans) for kind, spans in kinds.items() if spans])
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


def _span_bars(kind: str, spans: list[Span]) -> Bar:
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
