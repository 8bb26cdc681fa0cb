"""The machine as a grid of devices, a row a host, and where each lies on the mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from meshpar.planner.cost.run import Run

_MOST_COLUMNS, _MOST_ROWS, _MOST_NAMES = 16, 64, 32
_ROW_HEIGHT, _ABOVE, _BELOW = 26, 60, 20  # pixels


def device_grid(run: Run) -> Figure:
    """The grid, coloured by the position along a mesh axis of the reader's choice."""
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
            hovertext=_hovers(run, numbers, positions).reshape(rows, columns),
            hoverinfo="text",
            texttemplate="%{text}",
            colorscale="Blues",
            zmin=-0.5,
            zmax=2 * run.layout.mesh_shape[first],
            showscale=False,
            xgap=2,
            ygap=2,
        )
    )
    figure.update_layout(
        height=_ABOVE + _ROW_HEIGHT * rows + _BELOW,
        margin={"l": 70, "r": 20, "t": _ABOVE, "b": _BELOW},
        template="plotly_white",
        updatemenus=[_menu(run, positions, (rows, columns))],
    )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(**_hosts(run, rows, columns))
    return figure


def drawn_devices(run: Run) -> int:
    """Devices of the grid: all, or those of its most rows."""
    columns = _columns(run.cluster.devices_per_host)
    return min(run.cluster.num_devices, columns * _MOST_ROWS)


def _columns(devices_per_host: int) -> int:
    """As many as a host has devices, or a part of them that divides it."""
    most = min(_MOST_COLUMNS, devices_per_host)
    return next(size for size in range(most, 0, -1) if devices_per_host % size == 0)


def _positions(run: Run, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Each device's place along every mesh axis at work."""
    shape = run.layout.mesh_shape
    places = np.unravel_index(numbers, tuple(shape.values()))
    found = dict(zip(shape, places, strict=True))
    at_work = {axis: found[axis] for axis in shape if shape[axis] > 1}
    return at_work or {"data": found["data"]}


def _hovers(
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
                    "zmax": 2 * run.layout.mesh_shape[axis],
                }
            ],
        }
        for axis, place in positions.items()
    ]
    return {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}


def _hosts(run: Run, rows: int, columns: int) -> dict[str, object]:
    """Names of hosts beside their first rows, some where there are many."""
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
