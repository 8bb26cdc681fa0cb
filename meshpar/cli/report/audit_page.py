"""The page of `meshpar audit --html`."""

from __future__ import annotations

from collections.abc import Iterable

from meshpar.audit.collectives import axes_text
from meshpar.audit.overlap import BlockTimeline
from meshpar.audit.report import AuditReport
from meshpar.cli.report.block_plot import block_plot
from meshpar.cli.report.page import heading, page, paragraph, plot, table

_MIN_WIDTH = 640


def audit_page(report: AuditReport) -> str:
    """The file's text."""
    parts = [paragraph(line) for line in (*_summary(report), *report.notes)]
    parts += [heading("Over time"), *_timelines(report)]
    parts += [heading("Hidden behind matmuls"), _overlap(report)]
    parts += [heading("Collectives"), _collectives(report)]
    if report.complaints():
        parts += [heading("To look at"), *map(paragraph, report.complaints())]
    return page(f"{report.layout} compiled for {report.target}", parts)


def _summary(report: AuditReport) -> Iterable[str]:
    if report.problem:
        yield report.problem
    if report.memory is not None:
        yield (
            f"A device holds {report.memory.peak_bytes:,} bytes at most, "
            f"{report.memory.temp_bytes:,} of them temporaries, and multiplies "
            f"{report.flops:.4g} FLOPs."
        )
    if report.compiler_options:
        names = [f"{name}={value}" for name, value in report.compiler_options.items()]
        yield f"Compiler options: {', '.join(names)}."


def _timelines(report: AuditReport) -> Iterable[str]:
    if not report.timelines:
        yield paragraph(
            "No loop over blocks, or no table of this device's speeds: seconds are not "
            "known."
        )
    for one in report.timelines:
        yield paragraph(_in_words(one))
        yield plot(block_plot(one), min_width=_MIN_WIDTH)


def _in_words(one: BlockTimeline) -> str:
    exposed = sum(span.end_s - span.start_s for span in one.spans if span.is_exposed)
    return (
        f"{one.name.capitalize()} of a block, {one.executions:,} in a step: "
        f"{one.span_s * 1e3:.2f} ms by the table of devices and links, "
        f"{exposed * 1e3:.2f} ms of them waiting for collectives. What is no matmul "
        "takes no time here."
    )


def _overlap(report: AuditReport) -> str:
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


def _collectives(report: AuditReport) -> str:
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
