"""Step time against memory of what a search found, and of some that it rejected."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from meshpar.errors import InputError
from meshpar.planner.cost.estimate import (
    Estimate,
    estimate,
    gigabytes,
    milliseconds,
)
from meshpar.planner.search.search import SearchResult

if TYPE_CHECKING:
    from plotly.graph_objects import Figure, Scatter

_HEIGHT = 520  # pixels
_FAR_APART = 5


def plan_plot(found: SearchResult) -> Figure:
    """The scatter; pointing at a layout names it, and why it was rejected."""
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
    """Logarithmic where the values are far apart, with ticks that leave room."""
    look: dict[str, Any] = {"ticklabelstandoff": 4, "zeroline": False}
    if max(values) < _FAR_APART * min(values):
        return look
    return {**look, "type": "log", "dtick": "D2", "tickformat": "~g"}


def _estimated(found: SearchResult) -> Iterable[tuple[Estimate, str]]:
    """The rejected that can run at all, estimated, with their reasons."""
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
    points: list[tuple[Estimate, str]],
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


def _hover(name: str, one: Estimate, reason: str) -> str:
    """Lines short enough for a telephone."""
    numbers = (
        f"{milliseconds(one.step_s)}, {gigabytes(one.memory.total_bytes)}, MFU "
        f"{one.mfu:.1%}"
    )
    lines = [name, *_wrapped(str(one.run.layout).replace(",", ", ")), numbers]
    return "<br>".join([*lines, *_wrapped(reason)])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 48, break_long_words=False)


def _capacity(found: SearchResult, times_s: list[float]) -> Scatter:
    """A line at what a device holds, from the fastest layout to the slowest."""
    from plotly.graph_objects import Scatter

    return Scatter(
        name=f"a device holds {gigabytes(found.capacity_bytes)}",
        x=[min(times_s), max(times_s)],
        y=[found.capacity_bytes / 1e9] * 2,
        mode="lines",
        line={"color": "#b00020", "dash": "dash"},
        hoverinfo="skip",
    )
