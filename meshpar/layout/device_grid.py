"""HTML of a layout: its devices, coloured by what they hold, and its mesh axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from meshpar.html import Cell, element, grid, paragraph, shade, table

if TYPE_CHECKING:
    from meshpar.layout.layout import Layout

_MOST_ROWS, _MOST_COLUMNS = 32, 16

_SPLITS = {
    "data": "the batch",
    "fsdp": "the batch; with zero=3 the stored parameters too",
    "stage": "the layers",
    "context": "the sequence",
    "expert": "the experts; the batch, and by zero= the parameters, everywhere else",
    "tensor": "each matmul",
}


def layout_html(layout: Layout) -> str:
    """Return the HTML that a notebook shows for a layout."""
    parts = [] if layout.is_open else device_grid(layout)
    return element(f"Layout {layout}", [*parts, _mesh_axes(layout)])


def device_grid(layout: Layout) -> list[str]:
    """Return a grid of the layout's devices, a colour for each part of the parameters.

    Rows are positions along the outer mesh axes, columns along the innermost one. Of
    many devices the first are drawn.
    """
    shape = {axis: size for axis, size in layout.mesh_shape.items() if size > 1}
    shape = shape or {"data": 1}
    # Mesh axes whose devices hold other parts of the parameters.
    split = layout.split_axes if layout.zero else ()
    holding = [a for a in shape if a in ("stage", "expert", "tensor", *split)]
    columns = min(list(shape.values())[-1], _MOST_COLUMNS)
    num_rows = min(layout.num_devices // columns, _MOST_ROWS)
    innermost = list(shape)[-1]
    whole = columns == shape[innermost]
    num_parts = math.prod(shape[axis] for axis in holding)
    rows: dict[str, list[Cell]] = {}
    drawn = columns * num_rows
    for first in range(0, drawn, columns):
        outer = _place(first, shape)
        del outer[innermost]
        name = _words(outer) if whole else f"from device {first}"
        devices = range(first, first + columns)
        rows[name] = []
        for device in devices:
            place = _place(device, shape)
            part = 0
            for axis in holding:
                part = part * shape[axis] + place[axis]
            title = f"device {device}: {_words(place)}"
            rows[name].append(Cell(str(device), shade(part, num_parts), title))
    head = [f"{innermost} {at}" for at in range(columns)] if whole else [""] * columns
    return [
        paragraph(_meaning(layout, shape, holding, drawn)),
        grid(head, rows),
    ]


def _place(device: int, shape: dict[str, int]) -> dict[str, int]:
    """Return a device's position along every mesh axis, the outermost first."""
    place = {}
    for axis in reversed(shape):
        device, place[axis] = divmod(device, shape[axis])
    return dict(reversed(place.items()))


def _words(place: dict[str, int]) -> str:
    return ", ".join(f"{axis} {at}" for axis, at in place.items())


def _meaning(
    layout: Layout, shape: dict[str, int], holding: Sequence[str], drawn: int
) -> str:
    parts = math.prod(shape[axis] for axis in holding)
    total = layout.num_devices
    text = (
        f"{total} device{'s' if total > 1 else ''}. One colour is one part of the "
        f"parameters, of {parts}; {total // parts} "
        f"device{'s hold' if total // parts > 1 else ' holds'} each"
    )
    some = f"; drawn are the first {drawn}" if drawn < total else ""
    return f"{text}{some}."


def _mesh_axes(layout: Layout) -> str:
    def rows() -> Iterable[tuple[str, str, str]]:
        for axis, splits in _SPLITS.items():
            size = getattr(layout, axis)
            if size != 1:
                shown = "as many as the devices allow" if size == -1 else str(size)
                yield axis, shown, splits

    return table(["mesh axis", "size", "splits"], rows())
