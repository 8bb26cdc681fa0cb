"""Pages of `meshpar plan --html`: plans with their time and memory, or a curve."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshpar.cli.report.bars import time_plot
from meshpar.errors import InputError
from meshpar.html import assumed, heading, page, paragraph, plot, table
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.curve import BEND, Curve, Point, bend_in_words
from meshpar.planner.plan import Plan, gigabytes, milliseconds
from meshpar.planner.search.remedies import sensitivities
from meshpar.planner.search.result import SearchResult, assumptions, guess_note

if TYPE_CHECKING:
    from plotly.graph_objects import Figure, Scatter

    from meshpar.cli.confirm import Confirmed
    from meshpar.cli.measure import Measured
    from meshpar.planner.search.training_cost import TrainingCost


_HEIGHT = 520  # pixels
_FAR_APART = 5


def plan_page(
    found: SearchResult,
    confirmed: Sequence[Confirmed] = (),
    costs: Sequence[TrainingCost] = (),
    measured: Measured | None = None,
) -> str:
    """Return the text of the page, of a search that found plans."""
    best = found.plans[0]
    run, guess = best.run, guess_note(best.run.cluster.device)
    title = f"{run.workload.name} on {run.cluster.text}"
    parts = [
        *map(paragraph, best.answer),
        *(assumed(one.text) for one in assumptions(found.plans)),
        *(assumed(note) if note == guess else paragraph(note) for note in found.notes),
        paragraph(
            f"{found.considered_count:,} layouts considered in {found.seconds:.1f} s; "
            f"{found.rejected_count:,} rejected."
        ),
        heading("Where the time goes"),
        paragraph(
            "The first plans of the table below, plan 1 the fastest; the parts of a "
            "bar add up to a step. Point at a part for its share."
        ),
        plot(time_plot(found.plans)),
        heading("Plans, fastest first"),
        _plans(found.plans),
        *_training(found.plans, costs),
        heading("Time against memory"),
        plot(_plan_plot(found)),
        heading("Smallest for their time"),
        _plans(found.front),
        heading("The first plan"),
        *(paragraph(line.strip()) for line in best.lines),
        *(paragraph(change.text) for change in sensitivities(best)),
        heading("Rejected, such as"),
        table(
            ["layout", "reason"],
            [(str(other.layout), other.reason) for other in found.rejected],
        ),
    ]
    if measured:
        parts += [
            heading("Predicted against measured"),
            table(["layout", "predicted", "measured", "difference"], measured.rows()),
            *(paragraph(line) for line in measured.fitted_lines()),
        ]
    if confirmed:
        parts.append(heading("Predicted against compiled"))
    for one in confirmed:
        parts.append(paragraph(f"{one.layout} for {one.target}"))
        parts.append(table(["what", "predicted", "compiled", "difference"], one.rows()))
    return page(title, parts)


def _plans(plans: Iterable[Plan]) -> str:
    return table(
        [
            *("layout", "step", "MFU", "half the network", "memory"),
            *("computing", "bubble", "exposed", "host", "optimizer", "slowest device"),
        ],
        [
            (
                str(plan.run.layout),
                milliseconds(plan.step_s),
                f"{plan.mfu:.1%}",
                milliseconds(plan.half_network_step_s),
                gigabytes(plan.memory.total_bytes),
                milliseconds(plan.time.compute_s),
                milliseconds(plan.time.bubble_s),
                _exposed(plan),
                milliseconds(plan.time.host_s),
                milliseconds(plan.time.optimizer_s),
                milliseconds(plan.time.straggler_s),
            )
            for plan in plans
        ],
    )


def _training(plans: Sequence[Plan], costs: Sequence[TrainingCost]) -> Iterable[str]:
    if not costs:
        return
    yield heading("The whole training")
    yield table(
        ["layout", "what it takes"],
        [
            (str(plan.run.layout), cost.text)
            for plan, cost in zip(plans, costs, strict=True)
        ],
    )


def _exposed(plan: Plan) -> str:
    """Return the exposed time of each mesh axis, without line breaks inside."""
    each = [
        f"{axis} {milliseconds(seconds)}".replace(" ", "\N{NO-BREAK SPACE}")
        for axis, seconds in plan.time.exposed_s.items()
    ]
    return ", ".join(each) or "nothing"


def _plan_plot(found: SearchResult) -> Figure:
    """Return step time against memory; pointing names a layout, and why rejected."""
    from plotly.graph_objects import Figure

    rejected = [*_estimated(found)]
    every = [*found.plans, *found.front, *(one for one, _ in rejected)]
    times_s = [one.step_s for one in every]
    figure = Figure(
        [
            _points("rejected", "#8a8a8a", "x-thin-open", rejected),
            _points("plans", "#0072b2", "circle", [(one, "") for one in found.plans]),
            _points(
                "no other is both faster and smaller",
                "#d55e00",
                "circle-open",
                [(one, "") for one in found.front],
                mode="lines+markers",
            ),
            _points("fastest", "#000000", "star", [(found.plans[0], "")]),
            _capacity(found, times_s),
        ]
    )
    figure.update_layout(
        height=_HEIGHT,
        template="plotly_white",
        margin={"l": 70, "r": 20, "t": 120, "b": 60},
        legend={"x": 0, "y": 1, "yref": "container", "yanchor": "top"},
        hovermode="closest",
    )
    sizes = [one.memory.total_bytes for one in every]
    figure.update_xaxes(title="step time, s", tickangle=0, **_scale(times_s))
    figure.update_yaxes(title="memory of a device, GB", **_scale(sizes))
    return figure


def _scale(values: list[float]) -> dict[str, Any]:
    """Return the axis: logarithmic if the values differ much."""
    look: dict[str, Any] = {"ticklabelstandoff": 4, "zeroline": False}
    if max(values) < _FAR_APART * min(values):
        return look
    return {**look, "type": "log", "dtick": "D2", "tickformat": "~g"}


def _estimated(found: SearchResult) -> Iterable[tuple[Plan, str]]:
    """Yield the rejected layouts that can run, estimated, with their reasons."""
    run = found.plans[0].run
    for other in found.rejected:
        try:
            one = estimate(
                run.workload,
                run.cluster,
                other.layout,
                global_batch=run.global_batch,
                seq=run.seq,
                execution=run.execution,
            )
        except InputError:
            continue
        yield one, other.reason


def _points(
    name: str,
    color: str,
    symbol: str,
    points: list[tuple[Plan, str]],
    mode: str = "markers",
) -> Scatter:
    from plotly.graph_objects import Scatter

    return Scatter(
        name=name,
        x=[one.step_s for one, _ in points],
        y=[one.memory.total_bytes / 1e9 for one, _ in points],
        mode=mode,
        marker={"color": color, "symbol": symbol, "size": 10},
        hovertext=[_hover(name, one, reason) for one, reason in points],
        hoverinfo="text",
    )


def _hover(name: str, one: Plan, reason: str) -> str:
    """Return lines short enough for a telephone."""
    numbers = (
        f"{milliseconds(one.step_s)}, {gigabytes(one.memory.total_bytes)}, MFU "
        f"{one.mfu:.1%}"
    )
    lines = [name, *_wrapped(str(one.run.layout).replace(",", ", ")), numbers]
    return "<br>".join([*lines, *_wrapped(reason)])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 48, break_long_words=False)


def _capacity(found: SearchResult, times_s: list[float]) -> Scatter:
    """Return a line at a device's capacity, from the fastest layout to the slowest."""
    from plotly.graph_objects import Scatter

    return Scatter(
        name=f"a device holds {gigabytes(found.capacity_bytes)}",
        x=[min(times_s), max(times_s)],
        y=[found.capacity_bytes / 1e9] * 2,
        mode="lines",
        line={"color": "#b00020", "dash": "dash"},
        hoverinfo="skip",
    )


_SIZE = (8.0, 4.5)  # inches
_CURVE_HEIGHT = 460  # pixels
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
    look: dict[str, Any] = {"height": _CURVE_HEIGHT, "template": "plotly_white"}
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
