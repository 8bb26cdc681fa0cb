"""An audit's report as tables of a terminal, and as HTML of a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from meshpar.audit.collectives import axes_text
from meshpar.html import details, element, heading, paragraph, table
from meshpar.planner.plan import gigabytes

if TYPE_CHECKING:
    from rich.table import Table

    from meshpar.audit.report import AuditReport

_TEXT_WIDTH = 160


def collective_table(report: AuditReport) -> Table:
    """Return a table of every collective: mesh axes, bytes, times, reason, source."""
    table = _table("collective", "mesh axes", "type", "bytes", "on the wire", "times")
    table.add_column("reason", overflow="fold")
    table.add_column("source", overflow="fold")
    for row in report.rows:
        found = row.collective
        table.add_row(
            found.kind,
            axes_text(found.mesh_axes),
            found.dtype,
            f"{found.payload_bytes:,}",
            f"{found.wire_bytes:,}",
            str(found.executions) if found.counted else f">={found.executions}",
            row.reason,
            "/".join(found.source.split("/")[-2:]),
            style="red" if row.surprise else None,
        )
    return table


def totals_table(report: AuditReport) -> Table:
    """Return a table of the bytes of one run, by mesh axes and kind."""
    table = _table("total over", "collective", "times", "bytes", "on the wire")
    for (axes, kind), total in report.totals().items():
        table.add_row(
            axes,
            kind,
            f"{total['executions']:,}",
            f"{total['payload_bytes']:,}",
            f"{total['wire_bytes']:,}",
        )
    return table


def overlap_table(report: AuditReport) -> Table:
    """Return a table of the communication that matmuls hide, per run and device."""
    table = _table("hidden over", "collective", "on the wire", "share of bytes")
    for column in ("ms on the wire", "ms hidden", "ms exposed"):
        table.add_column(column, justify="right")
    for total in report.overlap():
        seconds = (total.wire_s, total.hidden_s, total.exposed_s)
        table.add_row(
            axes_text(total.mesh_axes),
            total.kind,
            f"{total.wire_bytes:,}",
            f"{total.hidden_share:.0%}",
            *("?" if each is None else f"{each * 1e3:,.2f}" for each in seconds),
        )
    return table


def buffer_table(report: AuditReport) -> Table:
    """Return a table of the largest arrays that the program writes."""
    table = _table("largest arrays", "type", "bytes", "operation", "source")
    for buffer in report.buffers:
        table.add_row(
            " ".join(map(str, buffer.dims)),
            buffer.dtype,
            f"{buffer.bytes:,}",
            buffer.opcode,
            "/".join(buffer.source.split("/")[-2:]),
        )
    return table


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    numbers = ("bytes", "on the wire", "times", "share of bytes")
    for column in headings:
        table.add_column(column, justify="right" if column in numbers else "left")
    return table


def as_text(*tables: Table) -> str:
    """Return tables as plain text, for an error message."""
    from rich.console import Console

    console = Console(width=_TEXT_WIDTH, no_color=True)
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    return captured.get()


def report_html(report: AuditReport) -> str:
    """Return the HTML that a notebook shows for a report."""
    name = report.layout or "a program"
    parts = [paragraph(line) for line in (*_verdict(report), *report.notes)]
    if not report.problem:
        parts += [_totals(report)]
        every = f"All {len(report.rows)} collectives, with the reason of each"
        parts += [details(every, collectives_html(report))]
        parts += [details("Hidden behind matmuls", overlap_html(report))]
    if report.complaints():
        parts += [heading("To look at"), *map(paragraph, report.complaints())]
    return element(f"Audit of {name}, compiled for {report.target}", parts)


def _verdict(report: AuditReport) -> Iterable[str]:
    if report.memory is not None:
        verdict = {True: ": fits", False: ": does not fit", None: ""}[report.fits]
        known = report.capacity_bytes is not None
        of = f" of {gigabytes(report.capacity_bytes or 0)}{verdict}" if known else ""
        peak = gigabytes(report.memory.peak_bytes)
        yield f"Memory of a device at the peak: {peak}{of}."
        yield f"FLOPs of its matmuls: {report.flops:.4g}."
    if not report.problem:
        yield (
            f"Collectives: {len(report.rows)}, of which nobody asked for "
            f"{len(report.surprises)}. Hazards: {len(report.hazards)}."
        )


def _totals(report: AuditReport) -> str:
    return table(
        ["over", "collective", "times", "bytes sent"],
        [
            (axes, kind, f"{total['executions']:,}", f"{total['wire_bytes']:,}")
            for (axes, kind), total in report.totals().items()
        ],
    )


def overlap_html(report: AuditReport) -> str:
    """Return a table of the communication that matmuls hide."""
    head = ["over", "collective", "bytes sent", "hidden", "ms", "ms exposed"]
    return table(
        head,
        [
            (
                axes_text(total.mesh_axes),
                total.kind,
                f"{total.wire_bytes:,}",
                f"{total.hidden_share:.0%}",
                _milliseconds(total.wire_s),
                _milliseconds(total.exposed_s),
            )
            for total in report.overlap()
        ],
    )


def collectives_html(report: AuditReport) -> str:
    """Return a table of every collective."""
    head = ["collective", "over", "bytes sent", "times", "ms hidden", "reason"]
    rows = []
    for row in report.rows:
        one, beside = row.collective, report.overlaps.get(row.collective.line)
        hidden_s = None if beside is None else beside.hidden_s
        rows.append(
            (
                one.kind,
                axes_text(one.mesh_axes),
                f"{one.wire_bytes:,}",
                f"{one.executions:,}",
                _milliseconds(hidden_s),
                row.reason,
            )
        )
    return table(head, rows)


def _milliseconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1e3:.3f}"
