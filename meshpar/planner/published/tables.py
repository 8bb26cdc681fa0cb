"""Rows of public performance tables, each of which says its whole run.

A row of `published.json`, `public_tables`, has the words that `meshpar estimate` takes:
hardware, model, layout, execution. One source of rows is one family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from meshpar.layout import Layout
from meshpar.planner.machine.execution import EXECUTIONS
from meshpar.planner.published.megatron import (
    Measured,
    estimate_published,
    memory_row,
    published,
    step_row,
)
from meshpar.planner.workload.shapes import workload_of


def family_rows(family: str) -> Iterator[Measured]:
    """Yield step times, and memory where it was printed, of one family's rows."""
    for row in _table():
        if row["family"] != family:
            continue
        layout = Layout.parse(row["layout"])
        planned = estimate_published(
            workload_of(row["model"]),
            layout,
            row["global_batch"],
            row["seq"],
            EXECUTIONS[row["execution"]],
            row["hardware"],
            hosts=row.get("hosts"),
        )
        calibrates = row.get("calibrates", False)
        measured_s = _step_s(row, layout)
        yield step_row(family, row["name"], measured_s, planned, calibrates=calibrates)
        if "memory_gib" in row:
            used = planned.memory.total_bytes
            yield memory_row(family, row["name"], row["memory_gib"], used)


def _step_s(row: dict[str, Any], layout: Layout) -> float:
    """Return the measured seconds of a step."""
    if row["unit"] == "step_s":
        return row["measured"]
    tokens = row["global_batch"] * row["seq"]
    return tokens / (row["measured"] * layout.num_devices)


def _table() -> list[dict[str, Any]]:
    return published()["public_tables"]["rows"]


FAMILIES = tuple(dict.fromkeys(row["family"] for row in _table()))
"""Names of the families, in the order of the table."""

SOURCES: tuple[Callable[[], Iterator[Measured]], ...] = tuple(
    partial(family_rows, family) for family in FAMILIES
)
"""Where the rows come from, one source a family."""
