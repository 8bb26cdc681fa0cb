"""Page of `meshpar show`: machine, shards, traffic, memory and timeline."""

from __future__ import annotations

from meshpar.cli.report.bars import (
    axes_text,
    link_text,
    memory_parts,
    memory_plot,
    ranks,
    traffic_plot,
)
from meshpar.cli.report.grids import (
    MOST_DEVICES,
    device_grid,
    drawn_devices,
    shards_plot,
)
from meshpar.cli.report.laid_out import AxisTraffic, LaidOut
from meshpar.cli.report.page import heading, page, paragraph, plot, table
from meshpar.cli.report.timeline import HOW_TO_READ, timeline_plot
from meshpar.lint.rows import Shards
from meshpar.planner.plan import gigabytes, milliseconds
from meshpar.schedules.render import summary

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
    text = (
        f"{cluster.hosts} {noun}{'s' if cluster.hosts > 1 else ''} of "
        f"{cluster.devices_per_host} devices, numbered along the mesh with "
        f"tensor innermost. A device has {gigabytes(device.memory_bytes)}; its link "
        f"inside carries {gigabytes(device.link_bytes_per_s)}/s, the network between "
        f"{noun}s {gigabytes(device.network_bytes_per_s)}/s, each way, by data sheet."
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
    some = f" Drawn are {drawn} of {layout.microbatches} microbatches."
    way = "in lock step" if found.run.execution.lock_step else "freely"
    text = (
        f"{summary(timeline)}. Ranks run {way}, with the times that the planner "
        f"estimates; what a step does once stands behind it. {HOW_TO_READ}"
    )
    return [
        paragraph(text + (some if drawn < layout.microbatches else "")),
        timeline_plot(timeline),
    ]
