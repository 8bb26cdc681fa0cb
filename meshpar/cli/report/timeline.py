"""A pipeline's timeline as a picture (matplotlib) and as a plot in a page (plotly).

Both show the same parts, in one unit of time: bars of actions, phases, and memory or
microbatches in flight. Two packages draw them, as a file must be drawn without a
browser, and a page has text on pointing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshpar.html import page, paragraph, plot
from meshpar.schedules.base import OP_WORDS, Op
from meshpar.schedules.render import summary
from meshpar.schedules.simulate import Count, Memory, Timeline, in_flight, spans

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from matplotlib.axes import Axes

NUM_NAMED_RANKS = 8
"""Most ranks that the legend of microbatches in flight names."""

PHASE_ROW = -1
"""The row above rank 0."""

_UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))

# Two shades each, by chunk; black text has a contrast above 7 on all, and colour-blind
# readers can distinguish them (hues of Okabe and Ito, 2008).
_SHADES = {
    Op.F: ("#8ec9f0", "#4fa3dd"),
    Op.B: ("#f7c77a", "#ee9f2d"),
    Op.I: ("#e9b3d3", "#d98abb"),
    Op.W: ("#9fdcc4", "#56bf98"),
}
_PHASE_COLORS = {"warm-up": "#e3e3e3", "steady": "#c4c4c4", "cool-down": "#e3e3e3"}

HOW_TO_READ = (
    "Numbers are microbatches; point at a bar for its times, scroll sideways where the "
    "plot is wider than the window."
)

_UNIT_INCHES, _ROW_INCHES, _COUNTS_INCHES, _REST_INCHES = 0.21, 0.27, 1.8, 1.9
_DIGIT_INCHES = 0.085
_BOX_HEIGHT = 0.8  # of a row
_PICTURE_FONT = 8
_LABEL: dict[str, Any] = {
    "ha": "center",
    "va": "center",
    "fontsize": _PICTURE_FONT,
    "in_layout": False,
}

# Pixels of a plot.
_UNIT_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 20, 640, 8000
_TICK_WIDTH, _MOST_COUNT_TICKS = 100, 6
_ROW_HEIGHT, _COUNTS_HEIGHT, _GAP, _TOP, _BOTTOM = 26, 170, 20, 50, 70
_FONT_SIZE = 10


class Bar(NamedTuple):
    """Bar of an action on its rank's row, or of a phase on the phases' row.

    Args:
        row: The rank, or `PHASE_ROW`.
        start, length: Times.
        text: Text inside, if there is room.
        hover: Text on pointing at it.
    """

    row: int
    start: float
    length: float
    text: str
    hover: str


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Bars under one name of the legend, of one colour or of one each."""

    name: str
    color: str | tuple[str, ...]
    bars: tuple[Bar, ...]


@dataclass(frozen=True, kw_only=True)
class TimelineParts:
    """A timeline in parts, all times in `unit`.

    Args:
        unit: `s`, `ms` or `µs`.
        end: End of the timeline.
        kinds: The actions that take time.
        phases: Warm-up, steady, cool-down, in this order.
        counts: Microbatches in flight of each rank, or their memory.
        counted: What `counts` are, with the unit.
    """

    unit: str
    end: float
    kinds: tuple[Kind, ...]
    phases: Kind
    counts: tuple[tuple[Count, ...], ...]
    counted: str = "in flight"

    @property
    def is_memory(self) -> bool:
        """True if `counts` is no number of microbatches."""
        return self.counted != "in flight"

    @property
    def num_units(self) -> float:
        """Length of the timeline in its shortest action."""
        lengths = [bar.length for kind in self.kinds for bar in kind.bars]
        return self.end / min(lengths) if lengths else 1.0

    @property
    def changes(self) -> list[float]:
        """Times at which one phase follows another."""
        return [bar.start for bar in self.phases.bars[1:]]

    @property
    def row_names(self) -> dict[int, str]:
        """Names of the rows, from the top down."""
        ranks = range(len(self.counts))
        return {PHASE_ROW: "phase", **{rank: f"rank {rank}" for rank in ranks}}

    @property
    def named_ranks(self) -> range:
        """Ranks that a legend names, as it cannot name all."""
        return range(0, len(self.counts), -(-len(self.counts) // NUM_NAMED_RANKS))

    def shade(self, rank: int) -> float:
        """Return a rank's place on a colour map, without its lightest end."""
        return 0.75 * rank / max(1, len(self.counts) - 1)


def timeline_parts(
    timeline: Timeline, memory: Memory | None = None, end_s: float = 0
) -> TimelineParts:
    """Return the parts of a timeline.

    Args:
        timeline: When every rank did what.
        memory: Of a microbatch; None to count microbatches.
        end_s: End of the time axis, if the timeline ends before.
    """
    end_s = max(end_s, float(timeline.end_s))
    kept = None if memory is None else memory.kept_mb(timeline)
    unit, scale = next(
        (one for one in _UNITS if end_s * one[1] >= 1), _UNITS[-1 if end_s else 1]
    )
    return TimelineParts(
        unit=unit,
        end=end_s * scale,
        kinds=_kinds(timeline, unit, scale),
        phases=_phases(timeline, unit, scale),
        counts=tuple(
            tuple(
                Count(float(since_s) * scale, number) for since_s, number in rank_counts
            )
            for rank_counts in in_flight(timeline, kept)
        ),
        counted="in flight" if memory is None else "memory, MB",
    )


def _phases(timeline: Timeline, unit: str, scale: float) -> Kind:
    bars = []
    for name, start_s, end_s in spans(timeline):
        start, end = float(start_s) * scale, float(end_s) * scale
        hover = f"{name}: {start:.4g} to {end:.4g} {unit}"
        bars.append(Bar(PHASE_ROW, start, end - start, name, hover))
    colors = tuple(_PHASE_COLORS[bar.text] for bar in bars)
    return Kind(name="phase", color=colors, bars=tuple(bars))


def _kinds(timeline: Timeline, unit: str, scale: float) -> tuple[Kind, ...]:
    schedule = timeline.schedule
    chunk_of = {
        stage: chunk
        for stages in schedule.stages_of_rank
        for chunk, stage in enumerate(stages)
    }
    chunks = [", even chunks", ", odd chunks"]
    if schedule.num_chunks <= 2:
        chunks = [", chunk 0", ", chunk 1"] if schedule.num_chunks == 2 else ["", ""]
    names = {(op, odd): OP_WORDS[op] + chunks[odd] for op in Op for odd in (0, 1)}
    bars: dict[tuple[Op, int], list[Bar]] = {key: [] for key in names}
    for rank, events in enumerate(timeline.events):
        for action, start_s, end_s in events:
            if end_s > start_s:
                key = (action.op, chunk_of[action.stage] % 2)
                start, length = float(start_s) * scale, float(end_s - start_s) * scale
                hover = (
                    f"<b>{action}</b>: {names[key]}<br>rank {rank}, stage "
                    f"{action.stage}, microbatch {action.microbatch}<br>{start:.4g} to "
                    f"{start + length:.4g} {unit}"
                )
                text = str(action.microbatch)
                bars[key].append(Bar(rank, start, length, text, hover))
    return tuple(
        Kind(name=names[op, odd], color=_SHADES[op][odd], bars=tuple(found))
        for (op, odd), found in bars.items()
        if found
    )


def write_timeline_picture(
    timeline: Timeline, path: str | Path, memory: Memory | None = None
) -> None:
    """Write a PNG or SVG: a row a rank, phases above, microbatches in flight below.

    With `memory` of a microbatch, theirs is below. Its width grows with the timeline,
    up to 60 inches; microbatches' numbers that do not fit are left out.
    """
    import matplotlib
    from matplotlib.figure import Figure

    parts = timeline_parts(timeline, memory)
    rows_height = _ROW_INCHES * (len(parts.counts) + 1)
    width = min(max(9.0, _UNIT_INCHES * parts.num_units), 60.0)
    height = rows_height + _COUNTS_INCHES + _REST_INCHES
    figure = Figure(figsize=(width, height), layout="constrained")
    rows, counts = figure.subplots(
        2, 1, sharex=True, height_ratios=[rows_height, _COUNTS_INCHES]
    )
    rows.set_title(summary(timeline), loc="left", fontsize=11)
    _draw_rows(rows, parts, inches_per_unit=(width - 1) / (parts.end or 1))
    _draw_counts(counts, parts, num_ticks=round(width))
    look: dict[str, Any] = {"ncols": 8, "fontsize": _PICTURE_FONT, "frameon": False}
    figure.legend(*rows.get_legend_handles_labels(), loc="outside upper left", **look)
    figure.legend(*counts.get_legend_handles_labels(), loc="outside lower left", **look)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path, dpi=100)


def _draw_rows(axes: Axes, parts: TimelineParts, inches_per_unit: float) -> None:
    for kind in (*parts.kinds, parts.phases):
        _fill(axes, kind, None if kind is parts.phases else kind.name)
        for bar in kind.bars:
            if bar.length * inches_per_unit >= _DIGIT_INCHES * len(bar.text):
                axes.text(bar.start + bar.length / 2, bar.row, bar.text, **_LABEL)
    axes.set_yticks([*parts.row_names], [*parts.row_names.values()])
    axes.set(ylim=(len(parts.counts) - 0.4, PHASE_ROW - 0.6), xlim=(0, parts.end or 1))
    _mark_phases(axes, parts)


def _fill(axes: Axes, kind: Kind, name: str | None) -> None:
    """Draw all bars as one collection: thousands of patches take minutes."""
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
    axes.set(xlabel=f"time, {parts.unit}", ylabel=parts.counted, ylim=(0, None))
    axes.yaxis.set_major_locator(MaxNLocator(integer=not parts.is_memory))
    axes.locator_params(axis="x", nbins=num_ticks)
    _mark_phases(axes, parts)


def _mark_phases(axes: Axes, parts: TimelineParts) -> None:
    for start in parts.changes:
        axes.axvline(start, color="#666666", linewidth=0.8, linestyle="--", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)


def timeline_page(*timelines: Timeline, memory: Memory | None = None) -> str:
    """Return the page of a timeline, or of several on one time axis.

    Args:
        timelines: When every rank did what, under each schedule.
        memory: Of a microbatch; None to count microbatches.
    """
    names = " and ".join(timeline.schedule.name for timeline in timelines)
    end_s = max(float(timeline.end_s) for timeline in timelines)
    parts = [timeline_parts(timeline, memory, end_s) for timeline in timelines]
    width = max(map(_plot_width, parts))
    blocks = [paragraph(HOW_TO_READ)]
    for timeline, of_timeline in zip(timelines, parts, strict=True):
        blocks += [paragraph(f"{summary(timeline)}."), _plot(of_timeline, width)]
    return page(f"Pipeline schedule {names}", blocks)


def timeline_plot(timeline: Timeline) -> str:
    """Return the plot: a row a rank, phases above, microbatches in flight below."""
    parts = timeline_parts(timeline)
    return _plot(parts, _plot_width(parts))


def _plot_width(parts: TimelineParts) -> int:
    return min(max(_LEAST_WIDTH, round(_UNIT_WIDTH * parts.num_units)), _MOST_WIDTH)


def _plot(parts: TimelineParts, width: int) -> str:
    from plotly.subplots import make_subplots

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
    figure.update_xaxes(nticks=width // _TICK_WIDTH, ticklabelstandoff=8)
    figure.update_yaxes(ticklabelstandoff=6)
    return plot(figure, min_width=width)


def _legend(**place: object) -> dict[str, object]:
    return {"orientation": "h", "x": 0, "yref": "container", **place}


def _add_rows(figure: go.Figure, parts: TimelineParts) -> None:
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


def _bars(kind: Kind) -> go.Bar:
    import plotly.graph_objects as go

    return go.Bar(
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


def _add_counts(figure: go.Figure, parts: TimelineParts) -> None:
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
                hovertemplate=f"rank {rank}: %{{y}} {parts.counted} from "
                f"%{{x:.4g}} {parts.unit}<extra></extra>",
            ),
            row=2,
            col=1,
        )
    most = max(number for counts in parts.counts for _, number in counts)
    every = None if parts.is_memory else -(-most // _MOST_COUNT_TICKS)
    figure.update_yaxes(row=2, title=parts.counted, rangemode="tozero", dtick=every)
    # Each tick has the unit: a title may be out of sight in a wide plot.
    figure.update_xaxes(ticksuffix=f" {parts.unit}", range=[0, parts.end or 1])
