"""Devices beside parameters: who holds which shard."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from meshpar.lint.rows import Shards
from meshpar.planner.cost.estimate import gigabytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from meshpar.cli.report.laid_out import LaidOut

MOST_DEVICES = 512
"""Devices that are drawn; those behind them hold the same shards, or the next ones."""

_MOST_TICKS = 16
_MOST_NUMBERED, _MOST_PARTED, _MOST_LINES = 32, 128, 64
_ROW_HEIGHT, _ABOVE, _BELOW = 26, 20, 40  # pixels


def shards_plot(found: LaidOut) -> Figure:
    """A row a parameter, a column a device, a colour a shard; grey is whole."""
    from plotly.graph_objects import Figure, Heatmap

    num_devices = min(found.run.cluster.num_devices, MOST_DEVICES)
    numbered = num_devices <= _MOST_NUMBERED
    figure = Figure(
        Heatmap(
            y=[shards.row.path for shards in found.shards],
            z=[_colors(shards, num_devices) for shards in found.shards],
            text=[shards.of_device[:num_devices] for shards in found.shards],
            hovertext=[_hovers(shards, found, num_devices) for shards in found.shards],
            hoverinfo="text",
            texttemplate="%{text}" if numbered else None,
            colorscale="Viridis",
            zmin=0,
            zmax=1,
            showscale=False,
            xgap=1 if num_devices <= _MOST_PARTED else 0,
            ygap=2,
        )
    )
    figure.update_layout(
        height=_ABOVE + _ROW_HEIGHT * len(found.shards) + _BELOW,
        margin={"l": 10, "r": 20, "t": _ABOVE, "b": _BELOW},
        template="plotly_white",
        plot_bgcolor="#dcdcdc",
    )
    figure.update_yaxes(autorange="reversed", automargin=True, ticklabelstandoff=6)
    figure.update_yaxes(showgrid=False)
    _mark_hosts(figure, found.run.cluster.devices_per_host, num_devices)
    return figure


def _mark_hosts(figure: Figure, devices_per_host: int, num_devices: int) -> None:
    """Numbers and white lines at the first device of each, or of some of them."""
    hosts = -(-num_devices // devices_per_host)
    every = devices_per_host * -(-hosts // _MOST_TICKS) if hosts > 1 else None
    figure.update_xaxes(dtick=every, tickangle=0, showgrid=False, zeroline=False)
    starts = range(devices_per_host, num_devices, devices_per_host)
    if len(starts) < _MOST_LINES:
        for start in starts:
            figure.add_vline(start - 0.5, line={"color": "white", "width": 3})


def _colors(shards: Shards, num_devices: int) -> list[float | None]:
    last = shards.number - 1
    return [shard / last if last else None for shard in shards.of_device[:num_devices]]


def _hovers(shards: Shards, found: LaidOut, num_devices: int) -> list[str]:
    text_of = {shard: _shard_text(shards, shard) for shard in set(shards.of_device)}
    each = found.run.cluster.devices_per_host
    return [
        f"<b>device {device}</b>, host {device // each}<br>{text_of[shard]}"
        for device, shard in enumerate(shards.of_device[:num_devices])
    ]


def _shard_text(shards: Shards, shard: int) -> str:
    row = shards.row
    if shards.number == 1:
        return f"{row.path}: whole, {gigabytes(row.bytes)}"
    parts = [
        _part_text(shards, name or "dim", part)
        for name, part, count in zip(
            row.logical_axes, shards.slices(shard), shards.counts, strict=True
        )
        if count > 1
    ]
    head = f"{row.path}: shard {shard} of {shards.number}, {gigabytes(row.bytes)}"
    return "<br>".join([head, *parts])


def _part_text(shards: Shards, name: str, part: slice) -> str:
    if name == "layers" and shards.places:
        return f"layers {_ranges(sorted(shards.places[part]))}"
    return f"{name} {part.start} to {part.stop - 1}"


def _ranges(layers: list[int]) -> str:
    """Layers in short, places without one left out.

    Example:
        >>> _ranges([-1, 0, 1, 2, 6, 7])
        '0 to 2, 6 to 7'
    """
    there = [layer for layer in layers if layer >= 0]
    runs = groupby(enumerate(there), key=lambda pair: pair[1] - pair[0])
    ends = [[layer for _, layer in run] for _, run in runs]
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in ends
    )
