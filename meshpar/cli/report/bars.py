"""Stacked bars: the time of plans, the memory of ranks, the traffic of mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

from meshpar.html import COLORS
from meshpar.planner.cost.memory import Memory
from meshpar.planner.cost.step_time import EXPOSED
from meshpar.planner.plan import Plan, gigabytes, milliseconds

if TYPE_CHECKING:
    from plotly.graph_objects import Bar, Figure

    from meshpar.cli.report.laid_out import AxisTraffic, LaidOut

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

_PLACES = {
    "chip": "in a chip",
    "host": "in a host",
    "torus": "on the torus",
    "network": "over the network",
}


class Part(NamedTuple):
    """A part of a row's bar.

    Args:
        row: Name of the row.
        kind: Name in the legend.
        size: Length of the part, in bytes or seconds.
        hover: Text on pointing at it.
    """

    row: str
    kind: str
    size: float
    hover: str


_BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_SECONDS = (("s", 1.0), ("ms", 1e-3))
_TIMED = 5
"""Plans whose time is drawn."""


def stacked_bars(
    parts: list[Part],
    *,
    title: str,
    limit: tuple[float, str] = (0.0, ""),
    units: Sequence[tuple[str, float]] = _BYTES,
) -> Figure:
    """Return stacked bars, the first row at the top, each part with its size.

    Args:
        parts: Parts of all rows, in the order in which they are stacked.
        title: Title of the axis; its unit follows.
        limit: Size to draw a line at, and its name; (0, "") for none.
        units: Names and sizes of units, the largest first.
    """
    from plotly.graph_objects import Figure

    most = max([limit[0], *(part.size for part in parts)])
    unit, size = next((one for one in units if most >= one[1]), units[-1])
    rows = list(dict.fromkeys(part.row for part in parts))
    kinds = list(dict.fromkeys(part.kind for part in parts))
    figure = Figure(
        [
            _bar([part for part in parts if part.kind == kind], color, size)
            for kind, color in zip(kinds, cycle(COLORS), strict=False)
        ]
    )
    if limit[1]:
        _add_limit(figure, limit[0] / size, limit[1])
    # Names stand side by side if there is width; else they take height from the rows.
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
    """Return the parts of one kind, in units of `size`."""
    from plotly.graph_objects import Bar

    return Bar(
        orientation="h",
        name=parts[0].kind,
        y=[part.row for part in parts],
        x=[part.size / size for part in parts],
        text=[f"{part.size / size:.3g}" for part in parts],
        hovertext=[part.hover for part in parts],
        hoverinfo="text",
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": "black", "size": _FONT_SIZE},
        marker={"color": color},
    )


def _add_limit(figure: Figure, at: float, name: str) -> None:
    """Add a line through all rows, and its name in the legend."""
    from plotly.graph_objects import Scatter

    line = {"color": "#b00020", "dash": "dash", "width": 2}
    figure.add_vline(at, line=line)
    figure.add_trace(Scatter(x=[None], y=[None], mode="lines", line=line, name=name))


def time_plot(plans: Sequence[Plan]) -> Figure:
    """Return a bar for each of the first plans, whose parts add up to its step."""
    drawn = plans[:_TIMED]
    names = dict.fromkeys(name for plan in drawn for name in plan.time.parts)
    waits = [name for name in names if name.startswith(EXPOSED)]
    first, second, *rest = (name for name in names if name not in waits)
    parts = [
        Part(
            f"plan {place}",
            name,
            seconds,
            f"<b>{name}</b> {milliseconds(seconds)} ({seconds / plan.step_s:.1%})<br>"
            f"plan {place}: step {milliseconds(plan.step_s)}, MFU {plan.mfu:.1%}",
        )
        for name in (first, second, *waits, *rest)
        for place, plan in enumerate(drawn, 1)
        if (seconds := plan.time.parts.get(name, 0.0)) > 0
    ]
    return stacked_bars(parts, title="time of a step", units=_SECONDS)


def memory_plot(found: LaidOut) -> Figure:
    """Return a bar for each rank, and a line at a device's capacity."""
    capacity = found.run.cluster.device.memory_bytes
    return stacked_bars(
        [
            Part(row, kind, size, f"{kind}: {gigabytes(size)}")
            for row, memory in ranks(found).items()
            for kind, size in memory_parts(memory).items()
        ],
        title="memory of a device",
        limit=(capacity, "capacity"),
    )


def memory_parts(memory: Memory) -> dict[str, float]:
    """Return the bytes of each kind at the peak; their sum is `total_bytes`.

    Example:
        >>> names = "parameter gradient optimizer fetched activation boundary logit"
        >>> names += " late gathered idle workspace ends"
        >>> sizes = {f"{name}_bytes": 1.0 for name in names.split()}
        >>> memory = Memory(**sizes, stage=0, in_flight=1)
        >>> [*memory_parts(memory)][:2]
        ['parameters', 'optimizer']
        >>> sum(memory_parts(memory).values()) == memory.total_bytes
        True
    """
    kept = {
        "parameters": memory.parameter_bytes,
        "optimizer": memory.optimizer_bytes,
        "gradients": memory.gradient_bytes,
    }
    if max(memory.ends_bytes, memory.fetched_bytes) == (
        memory.temporary_bytes - memory.gradient_bytes
    ):
        later = {
            "whole gradients": memory.ends_bytes,
            "fetched state": memory.fetched_bytes,
        }
        last = max(later, key=lambda name: later[name])
        parts = {**kept, last: later[last]}
    else:
        gathered = min(memory.gathered_bytes, memory.other_bytes)
        at_loss = memory.logit_bytes - memory.late_bytes
        in_block = memory.workspace_bytes - memory.idle_bytes
        last = "logits" if at_loss > in_block else "workspace"
        parts = {
            **kept,
            "activations": memory.activation_bytes,
            "stash": memory.stash_bytes,
            "gathered": gathered,
            last: memory.other_bytes - gathered,
        }
    return {name: size for name, size in parts.items() if size > 0}


def ranks(found: LaidOut) -> dict[str, Memory]:
    """Return name of a row -> memory of its devices."""
    if len(found.memories) == 1:
        return {"every device": found.memories[0]}
    return {f"rank {memory.stage}": memory for memory in found.memories}


def traffic_plot(found: LaidOut) -> Figure:
    """Return a bar for each mesh axis."""
    parts = []
    for one in found.traffic:
        sizes: dict[str, float] = {}
        for sent in one.sent:
            sizes[sent.kind] = sizes.get(sent.kind, 0.0) + sent.wire_bytes
        parts += [
            Part(axes_text(one), kind, size, _traffic_hover(one, kind))
            for kind, size in sizes.items()
        ]
    return stacked_bars(
        parts,
        title="sent by a device in a step",
    )


def axes_text(one: AxisTraffic) -> str:
    """Return the mesh axes and their size: `data+fsdp=16`."""
    return f"{'+'.join(one.mesh_axes)}={one.members}"


def link_text(one: AxisTraffic) -> str:
    """Return the place of their link: `in a host`."""
    return _PLACES.get(one.link.name, one.link.name)


def _traffic_hover(one: AxisTraffic, kind: str) -> str:
    speed = f"{gigabytes(one.link.bytes_per_s)}/s"
    lines = [f"<b>{kind}</b> over {axes_text(one)}, {link_text(one)} at {speed}"]
    lines += [
        f"{gigabytes(sent.wire_bytes)}: {sent.reason}"
        for sent in one.sent
        if sent.kind == kind
    ]
    return "<br>".join(lines)
