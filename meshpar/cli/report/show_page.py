"""Page of `meshpar show`: machine, shards, traffic, memory and timeline."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from meshpar.cli.report.bars import (
    axes_text,
    link_text,
    memory_parts,
    memory_plot,
    ranks,
    traffic_plot,
)
from meshpar.cli.report.laid_out import AxisTraffic, LaidOut
from meshpar.cli.report.timeline import HOW_TO_READ, timeline_plot
from meshpar.html import heading, page, paragraph, plot, table
from meshpar.lint.findings import Shards
from meshpar.planner.machine.mixed import crossing_first
from meshpar.planner.plan import gigabytes, milliseconds
from meshpar.schedules.render import summary

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from meshpar.cli.report.laid_out import LaidOut
    from meshpar.planner.cost.run import Run


_KIND = "kind of device"
"""Entry of the menu of colours, and title of its legend, on mixed hardware."""

_LEAST_WIDTH = 640  # pixels, of what has many columns


def show_page(found: LaidOut) -> str:
    """Return the text of the page."""
    run = found.run
    return page(
        f"{run.workload.name} on {run.cluster.text}",
        [
            *map(paragraph, found.estimate.answer),
            heading("Machine"),
            *_machine(found),
            heading("Who holds what"),
            *_parameters(found),
            heading("What each mesh axis sends"),
            *_traffic(found),
            heading("Memory of a device"),
            paragraph(
                "As the planner estimates it, when most is there at once. Gathered "
                "are parameters whole or cast for use; workspace is what the backward "
                "of one block needs beside."
            ),
            plot(memory_plot(found)),
            _memory(found),
            heading("Timeline"),
            *_timeline(found),
        ],
    )


def _machine(found: LaidOut) -> list[str]:
    cluster, drawn = found.run.cluster, drawn_devices(found.run)
    device = cluster.device
    noun = "slice" if cluster.torus else "host"
    outermost, least = "", ""
    if cluster.parts:
        axis, _ = crossing_first(cluster, found.run.layout.mesh_shape)
        outermost, least = f"{axis} outermost and ", "at least "
    text = (
        f"{cluster.hosts} {noun}{'s' if cluster.hosts > 1 else ''} of "
        f"{cluster.devices_per_host} devices, numbered along the mesh with {outermost}"
        f"tensor innermost. A device has {least}{gigabytes(device.memory_bytes)}; its "
        f"link inside carries {gigabytes(device.link_bytes_per_s)}/s, the network "
        f"between {noun}s {gigabytes(device.network_bytes_per_s)}/s, each way, by data "
        "sheet."
    )
    legend = (
        "A square is a device with its number, its colour its place along the mesh "
        "axis that the menu names; devices of one colour hold the same part of what "
        "that axis splits."
    )
    return [
        paragraph(text),
        paragraph(legend),
        *_drawn_devices_text(found, drawn),
        plot(device_grid(found.run)),
    ]


def _drawn_devices_text(found: LaidOut, drawn: int) -> list[str]:
    total = found.run.cluster.num_devices
    drawn_of = f"Drawn are the first {drawn:,} of {total:,} devices."
    return [paragraph(drawn_of)] if drawn < total else []


def _parameters(found: LaidOut) -> list[str]:
    return [
        paragraph(
            "A row is a parameter, a column a device, white lines part hosts: where "
            "the colour is the same, the shard is; grey is whole on every device. "
            "Point at a cell for its part."
        ),
        *_drawn_devices_text(found, MOST_DEVICES),
        plot(shards_plot(found), min_width=_LEAST_WIDTH),
        table(
            [
                "parameter",
                "shape",
                "split over",
                "a shard",
                "shards x copies",
                "states over",
            ],
            [_parameter(shards) for shards in found.shards],
        ),
    ]


def _parameter(shards: Shards) -> tuple[str, ...]:
    row = shards.row
    return (
        row.path,
        " x ".join(map(str, row.shape)),
        row.split_text(row.mesh_axes),
        gigabytes(row.bytes),
        f"{shards.number} x {shards.copies}",
        row.split_text(shards.state_mesh_axes),
    )


def _traffic(found: LaidOut) -> list[str]:
    if not found.traffic:
        return [paragraph("One device sends nothing.")]
    head = ["mesh axes", "link", "achieved", "sent a step", "exposed"]
    return [
        paragraph("Bytes that one device sends in a step, and the link they ride."),
        plot(traffic_plot(found)),
        table(head, map(_axis, found.traffic)),
    ]


def _axis(one: AxisTraffic) -> tuple[str, ...]:
    return (
        axes_text(one),
        link_text(one),
        f"{gigabytes(one.link.bytes_per_s)}/s",
        gigabytes(one.wire_bytes),
        "with the first axis" if one.exposed_s is None else milliseconds(one.exposed_s),
    )


def _memory(found: LaidOut) -> str:
    """Return the numbers of the plot: a row a kind, a column a rank."""
    every = {row: memory_parts(memory) for row, memory in ranks(found).items()}
    kinds = dict.fromkeys(kind for parts in every.values() for kind in parts)
    rows = [
        (kind, *(gigabytes(parts.get(kind, 0.0)) for parts in every.values()))
        for kind in kinds
    ]
    totals = (gigabytes(sum(parts.values())) for parts in every.values())
    return table(["kind", *every], [*rows, ("all", *totals)])


def _timeline(found: LaidOut) -> list[str]:
    layout, timeline = found.run.layout, found.timeline
    drawn = timeline.schedule.num_microbatches
    number = max(layout.data_splits, default=layout.microbatches)
    some = f" Drawn are {drawn} of {number} microbatches."
    way = "in lock step" if found.run.execution.lock_step else "freely"
    if found.run.execution.lock_step and layout.divergent:
        way = "tick by tick, each with an action of its own"
    text = (
        f"{summary(timeline)}. Ranks run {way}, with the times that the planner "
        f"estimates; what a step does once stands behind it. {HOW_TO_READ}"
    )
    if layout.data_splits:
        text += " Drawn is the part of data that takes longest."
    return [
        paragraph(text + (some if drawn < number else "")),
        timeline_plot(timeline),
    ]


MOST_DEVICES = 512
"""Drawn devices; those after them hold the same shards, or the next ones."""

_MOST_COLUMNS, _MOST_ROWS, _MOST_NAMES = 16, 64, 32
_MOST_TICKS, _MOST_PLACES = 16, 8
_MOST_NUMBERED, _MOST_PARTED, _MOST_LINES = 32, 128, 64

_PLACE_COLORS = ((0.0, "#f0f6fc"), (1.0, "#6baed6"))
"""Colours of the first and last place along a mesh axis; black is readable on all."""

# Pixels.
_ROW_HEIGHT = 26
_GRID_ABOVE, _GRID_BELOW = 60, 80
_ABOVE, _BELOW = 20, 40


def device_grid(run: Run) -> Figure:
    """Return the grid, coloured by position along a mesh axis of a menu."""
    from plotly.graph_objects import Figure, Heatmap

    columns = _columns(run.cluster.devices_per_host)
    rows = min(_MOST_ROWS, run.cluster.num_devices // columns)
    numbers = np.arange(rows * columns)
    positions = _positions(run, numbers)
    first = next(iter(positions))
    figure = Figure(
        Heatmap(
            z=positions[first].reshape(rows, columns),
            text=numbers.reshape(rows, columns),
            hovertext=_device_hovers(run, numbers, positions).reshape(rows, columns),
            hoverinfo="text",
            texttemplate="%{text}",
            colorscale=_PLACE_COLORS,
            zmin=0,
            zmax=_last(run, first),
            colorbar=_legend(run, first),
            xgap=2,
            ygap=2,
        )
    )
    figure.update_layout(
        height=_GRID_ABOVE + _ROW_HEIGHT * rows + _GRID_BELOW,
        margin={"l": 70, "r": 20, "t": _GRID_ABOVE, "b": _GRID_BELOW},
        template="plotly_white",
        updatemenus=[_menu(run, positions, (rows, columns))],
    )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(**_hosts(run, rows, columns))
    return figure


def drawn_devices(run: Run) -> int:
    """Return the number of devices in the grid."""
    columns = _columns(run.cluster.devices_per_host)
    return min(run.cluster.num_devices, columns * _MOST_ROWS)


def _columns(devices_per_host: int) -> int:
    """Return the devices of a host, or the most that divide it and fit the width."""
    most = min(_MOST_COLUMNS, devices_per_host)
    return next(size for size in range(most, 0, -1) if devices_per_host % size == 0)


def _positions(run: Run, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Each device's place along every mesh axis at work."""
    shape, cluster = run.layout.mesh_shape, run.cluster
    if cluster.parts:
        _, shape = crossing_first(cluster, shape)
    places = np.unravel_index(numbers, tuple(shape.values()))
    along = dict(zip(shape, places, strict=True))
    split = {axis: along[axis] for axis in shape if shape[axis] > 1}
    if cluster.parts:
        ends = np.cumsum([part.num_devices for part in cluster.parts])
        return {_KIND: np.searchsorted(ends, numbers, side="right"), **split}
    return split or {"data": along["data"]}


def _num_places(run: Run, axis: str) -> int:
    """Return the number of places along a mesh axis, or of kinds of devices."""
    return len(run.cluster.parts) if axis == _KIND else run.layout.mesh_shape[axis]


def _mesh_numbers(run: Run, num_devices: int) -> np.ndarray:
    """Return the number along the mesh of each device, in the order of the hosts."""
    shape = run.layout.mesh_shape
    places = _positions(run, np.arange(num_devices))
    along = [places.get(axis, np.zeros(num_devices, int)) for axis in shape]
    return np.ravel_multi_index(along, tuple(shape.values()))


def _device_hovers(
    run: Run, numbers: np.ndarray, positions: dict[str, np.ndarray]
) -> np.ndarray:
    host = numbers // run.cluster.devices_per_host
    lines = [
        f"<b>device {number}</b>, host {host[number]}<br>"
        + ", ".join(f"{axis} {place[number]}" for axis, place in positions.items())
        for number in numbers
    ]
    return np.array(lines, object)


def _menu(
    run: Run, positions: dict[str, np.ndarray], shape: tuple[int, int]
) -> dict[str, object]:
    buttons = [
        {
            "label": f"coloured by {axis}",
            "method": "restyle",
            "args": [
                {
                    "z": [place.reshape(shape).tolist()],
                    "zmax": _last(run, axis),
                    "colorbar": _legend(run, axis),
                }
            ],
        }
        for axis, place in positions.items()
    ]
    return {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}


def _last(run: Run, axis: str) -> int:
    """Return the last place along a mesh axis, at least 1 to span a scale."""
    return max(1, _num_places(run, axis) - 1)


def _legend(run: Run, axis: str) -> dict[str, object]:
    """Return the bar of colours below the grid: places along a mesh axis."""
    size = _num_places(run, axis)
    places = [*range(0, size, -(-size // _MOST_PLACES))]
    names = [part.device.name for part in run.cluster.parts]
    is_kind = axis == _KIND
    return {
        "title": {"text": axis if is_kind else f"place along {axis}", "side": "top"},
        "orientation": "h",
        "tickvals": places,
        "ticktext": names if is_kind else [str(place) for place in places],
        "thickness": 12,
        "len": 0.5,
        "x": 0,
        "xanchor": "left",
        "y": 0,
        "yanchor": "top",
    }


def _hosts(run: Run, rows: int, columns: int) -> dict[str, object]:
    """Return the axis with the names of hosts, or of some, at their first rows."""
    each = run.cluster.devices_per_host // columns
    noun = "slice" if run.cluster.torus else "host"
    every = each * -(-rows // (_MOST_NAMES * each))
    starts = [*range(0, rows, every)]
    return {
        "autorange": "reversed",
        "showgrid": False,
        "zeroline": False,
        "tickvals": starts,
        "ticktext": [f"{noun} {start // each}" for start in starts],
        "ticklabelstandoff": 4,
    }


def shards_plot(found: LaidOut) -> Figure:
    """Return a row a parameter, a column a device, a colour a shard; grey is whole."""
    from plotly.graph_objects import Figure, Heatmap

    num_devices = min(found.run.cluster.num_devices, MOST_DEVICES)
    numbered = num_devices <= _MOST_NUMBERED
    colors = []
    numbers = _mesh_numbers(found.run, num_devices)
    every = [np.array(shards.of_device)[numbers] for shards in found.shards]
    for shards, drawn in zip(found.shards, every, strict=True):
        last = shards.number - 1
        colors.append([shard / last if last else None for shard in drawn])
    figure = Figure(
        Heatmap(
            y=[shards.row.path for shards in found.shards],
            z=colors,
            text=every,
            hovertext=[
                _shard_hovers(shards, found, num_devices) for shards in found.shards
            ],
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
    """Mark the first device of each host, or of some, by a number and a white line."""
    hosts = -(-num_devices // devices_per_host)
    every = devices_per_host * -(-hosts // _MOST_TICKS) if hosts > 1 else None
    figure.update_xaxes(dtick=every, tickangle=0, showgrid=False, zeroline=False)
    starts = range(devices_per_host, num_devices, devices_per_host)
    if len(starts) < _MOST_LINES:
        for start in starts:
            figure.add_vline(start - 0.5, line={"color": "white", "width": 3})


def _shard_hovers(shards: Shards, found: LaidOut, num_devices: int) -> list[str]:
    texts = {shard: _shard_text(shards, shard) for shard in set(shards.of_device)}
    each = found.run.cluster.devices_per_host
    return [
        f"<b>device {device}</b>, host {device // each}<br>"
        f"{texts[shards.of_device[number]]}"
        for device, number in enumerate(_mesh_numbers(found.run, num_devices))
    ]


def _shard_text(shards: Shards, shard: int) -> str:
    row = shards.row
    if shards.number == 1:
        return f"{row.path}: whole, {gigabytes(row.bytes)}"
    parts = []
    slices = shards.slices(shard)
    for name, part, count in zip(row.logical_axes, slices, shards.counts, strict=True):
        if count > 1 and name == "layers" and shards.places:
            parts.append(f"layers {_ranges(sorted(shards.places[part]))}")
        elif count > 1:
            parts.append(f"{name or 'dim'} {part.start} to {part.stop - 1}")
    head = f"{row.path}: shard {shard} of {shards.number}, {gigabytes(row.bytes)}"
    return "<br>".join([head, *parts])


def _ranges(layers: list[int]) -> str:
    """Return layers as ranges, leaving out places without one.

    Example:
        >>> _ranges([-1, 0, 1, 2, 6, 7])
        '0 to 2, 6 to 7'
    """
    present = [layer for layer in layers if layer >= 0]
    runs = groupby(enumerate(present), key=lambda pair: pair[1] - pair[0])
    ends = [[layer for _, layer in run] for _, run in runs]
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in ends
    )
