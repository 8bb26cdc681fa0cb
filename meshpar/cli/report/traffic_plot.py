"""What each mesh axis sends in a step, by kind of collective, over which link."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.cli.report.bars import Part, stacked_bars
from meshpar.planner.cost.estimate import gigabytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from meshpar.cli.report.laid_out import AxisTraffic, LaidOut

_PLACES = {"host": "in a host", "torus": "on the torus", "network": "over the network"}


def traffic_plot(found: LaidOut) -> Figure:
    """A bar for each mesh axis."""
    return stacked_bars(
        [
            Part(axes_text(one), kind, sent, _hover(one, kind))
            for one in found.traffic
            for kind, sent in _by_kind(one).items()
        ],
        title="sent by a device in a step",
        limit=(0.0, ""),
    )


def axes_text(one: AxisTraffic) -> str:
    """The mesh axes and their size: `data+fsdp=16`."""
    return f"{'+'.join(one.mesh_axes)}={one.members}"


def link_text(one: AxisTraffic) -> str:
    """Where they lie: `in a host`."""
    return _PLACES.get(one.link.name, one.link.name)


def _by_kind(one: AxisTraffic) -> dict[str, float]:
    sizes: dict[str, float] = {}
    for sent in one.sent:
        sizes[sent.kind] = sizes.get(sent.kind, 0.0) + sent.wire_bytes
    return sizes


def _hover(one: AxisTraffic, kind: str) -> str:
    speed = f"{gigabytes(one.link.bytes_per_s)}/s"
    lines = [f"<b>{kind}</b> over {axes_text(one)}, {link_text(one)} at {speed}"]
    lines += [
        f"{gigabytes(sent.wire_bytes)}: {sent.reason}"
        for sent in one.sent
        if sent.kind == kind
    ]
    return "<br>".join(lines)
