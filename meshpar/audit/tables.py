"""An audit's report as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from meshpar.audit.collectives import axes_text
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
    for heading in ("ms on the wire", "ms hidden", "ms exposed"):
        table.add_column(heading, justify="right")
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
    table = Table(box=None, pad_edge=False)
    numbers = ("bytes", "on the wire", "times", "share of bytes")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left")
    return table


def as_text(*tables: Table) -> str:
    """Return tables as plain text, for an error message."""
    console = Console(width=_TEXT_WIDTH, no_color=True)
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    return captured.get()
