"""A scaling curve as a picture and as a page: efficiency, and what takes the rest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshpar.html import heading, page, paragraph, plot, table
from meshpar.planner.curve import BEND, Curve, Point, bend_in_words
from meshpar.planner.plan import milliseconds

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_SIZE = (8.0, 4.5)  # inches
_HEIGHT = 460  # pixels
_COLORS = (
    *("#0072b2", "#e69f00", "#d55e00", "#cc79a7", "#56b4e9", "#009e73"),
    *("#f0e442", "#999999", "#7f3c8d", "#8c6d31", "#1b1b1b"),
)


def write_curve_picture(name: str, curve: Curve, path: str | Path) -> None:
    """Write a PNG or SVG with a bar for each number of devices."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    labels, bottoms = _labels(curve), [0.0] * len(curve.fitting)
    for color, (part, shares) in zip(_COLORS, _bars(curve), strict=False):
        axes.bar(labels, shares, bottom=bottoms, label=part, color=color, width=0.8)
        bottoms = [one + share for one, share in zip(bottoms, shares, strict=True)]
    axes.axhline(BEND, color="#444444", linewidth=1, linestyle="--")
    figure.suptitle(_title(name, curve), x=0.01, ha="left", fontsize=11)
    axes.set(ylabel="share of devices' time", xlabel="devices", ylim=(0, 1))
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path, dpi=100)


def curve_page(name: str, curve: Curve) -> str:
    """Return the text of a page: the plot, its bend, and the plan of every point."""
    return page(
        _title(name, curve),
        [
            paragraph(bend_in_words(curve)),
            *([paragraph(curve.note)] if curve.note else []),
            plot(_figure(curve)),
            heading("The fastest plans"),
            table(
                ["layout", "devices", "batch", "step", "MFU", "efficiency", "why"],
                [_row(point) for point in curve.fitting],
            ),
        ],
    )


def _figure(curve: Curve) -> Figure:
    from plotly.graph_objects import Bar, Figure

    labels = _labels(curve)
    figure = Figure(
        [
            Bar(name=part, x=labels, y=shares, marker_color=color)
            for color, (part, shares) in zip(_COLORS, _bars(curve), strict=False)
        ]
    )
    figure.add_hline(y=BEND, line={"dash": "dash", "color": "#444444"})
    look: dict[str, Any] = {"height": _HEIGHT, "template": "plotly_white"}
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    figure.update_layout(barmode="stack", legend=legend, **look)
    figure.update_xaxes(title="devices", type="category")
    figure.update_yaxes(title="share of devices' time", tickformat=".0%")
    return figure


def _bars(curve: Curve) -> list[tuple[str, list[float]]]:
    """Return the shares of every point: efficiency, then each part that takes more.

    Time that a part saves shortens the bars of those that take more.
    """

    def share(point: Point, part: str) -> float:
        more = sum(share for share in point.lost.values() if share > 0)
        lost = max(0.0, point.lost.get(part, 0.0))
        return lost * (1 - point.efficiency) / more if more else 0.0

    points = curve.fitting
    parts = dict.fromkeys(name for point in points for name in point.lost)
    bars = [("efficiency", [min(1.0, point.efficiency) for point in points])]
    for part in parts:
        shares = [share(point, part) for point in points]
        if max(shares) >= 0.001:
            bars.append((f"more {part}", shares))
    return bars


def _labels(curve: Curve) -> list[str]:
    return [f"{point.num_devices:,}" for point in curve.fitting]


def _title(name: str, curve: Curve) -> str:
    last = curve.fitting[-1]
    kept = (
        "the same batch"
        if curve.batch == "strong"
        else f"as many {curve.noun} a device"
    )
    return f"{name} on up to {last.cluster.text}: {curve.batch} scaling, {kept}"


def _row(point: Point) -> tuple[str, ...]:
    plan = point.plan
    if plan is None:
        return ()
    return (
        plan.run.layout_text,
        f"{point.num_devices:,}",
        f"{point.global_batch:,}",
        milliseconds(plan.step_s),
        f"{plan.mfu:.1%}",
        f"{point.efficiency:.1%}",
        f"{point.lost[point.most_lost]:.1%} more {point.most_lost}: {point.why}"
        if point.most_lost
        else "",
    )
