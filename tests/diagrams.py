"""The pictures of docs/how_it_works.md: a step, a tick and an audit, from the code.

    python -m tests.diagrams docs/images        (or: make diagrams)

The step and the audit are those of the smallest Llama on eight virtual devices: its
collectives come from `meshpar.audit`, in the order of the program, with the line that
asked for each. The tick is one of `meshpar.schedules.tick_table`. Text stays text.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
import optax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from meshpar import audit, emulate, make_train_step
from meshpar.audit.report import AuditReport
from meshpar.models.presets import build
from meshpar.schedules import make_schedule, tick_table
from meshpar.testing.batches import random_batch

LAYOUT = "data=2,fsdp=2,tensor=2"
BATCH, SEQ = 8, 32

STAGES, MICROBATCHES, TICK = 4, 6, 6

_BLUE, _ORANGE, _GREEN, _GREY = "#d5eafa", "#fce3bd", "#d3f0e5", "#ececec"
_FONT = 8.5

PARTS = (
    ("place", "rows to devices", "train/batch_placement.py"),
    ("forward", "embed, blocks, head", "parallel/program.py"),
    ("backward", "from the last block", "parallel/blocks.py"),
    ("reduce", "gradients", "parallel/reduction.py"),
    ("update", "norm, optimizer", "train/step_functions.py"),
)
"""Parts of a step, in order, and where each is."""

COLUMNS = {"forward": 0, "backward": 1, "reduce": 2, "update": 2}
"""Part -> column of its collectives."""


def main(folder: Path) -> None:
    """Draw all pictures."""
    emulate(8)
    step = make_train_step(build("tiny"), optax.adamw(1e-3), LAYOUT, max_grad_norm=1.0)
    report = audit(step, random_batch(step.model, BATCH, SEQ, seed=0))
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "meshpar"}):
        for name, figure in (
            ("step", step_figure(report)),
            ("tick", tick_figure()),
            ("audit", audit_figure(report)),
        ):
            figure.savefig(folder / f"how_{name}.svg", metadata={"Date": None})


def step_figure(report: AuditReport) -> Figure:
    """Draw the parts of a step, and the collectives of each."""
    columns: list[dict[tuple, list[int]]] = [{}, {}, {}]
    for row in report.rows:
        one = row.collective
        part = step_part(one)
        key = (part, one.kind, one.mesh_axes, row.reason, source(one))
        counts = columns[COLUMNS[part]].setdefault(key, [0, 0])
        counts[0] += one.executions
        counts[1] += one.executions * one.wire_bytes
    top = 0.85 * max(map(len, columns)) + 0.3
    figure, axes = canvas(10.2, top + 1.2)
    for at, (name, what, where) in enumerate(PARTS):
        left = 2.07 * at
        box(axes, left, top, 1.85, 0.85, f"{name}: {what}\n{where}", _GREY)
        if at:
            arrow(axes, (left - 0.22, top + 0.425), (left, top + 0.425))
    for column, collectives in enumerate(columns):
        for place, (key, (times, sent)) in enumerate(collectives.items()):
            part, kind, mesh_axes, reason, line = key
            text = (
                f"{part}: {kind} over {'+'.join(mesh_axes)}\n{reason}\n{times} in a "
                f"step, {sent:,} bytes; {line}"
            )
            color = (_BLUE, _ORANGE, _GREEN)[column]
            y = top - 0.2 - 0.85 * (place + 1)
            box(axes, 3.45 * column, y, 3.23, 0.78, text, color)
    return figure


def step_part(one: Any) -> str:
    """Return the part of a step that a collective belongs to, by JAX's path of it."""
    path = one.op_path
    if "asked-gradient_norm" in path:
        return "update"
    if "transpose" in path or "jvp" in path:
        return "backward" if "transpose" in path or "gradient" in path else "forward"
    return "reduce" if "asked-gradient" in path else "forward"


def tick_figure() -> Figure:
    """Draw all ticks of a schedule, and the moments of one of them."""
    schedule = make_schedule("1f1b", STAGES, MICROBATCHES)
    table = tick_table(schedule)
    figure, axes = canvas(10.2, 7.4)
    width = 9.2 / table.num_ticks
    axes.text(
        0,
        7.15,
        f"1f1b in lock step: {STAGES} ranks, {MICROBATCHES} "
        f"microbatches, {table.num_ticks} ticks",
        fontsize=11,
    )
    for rank in range(STAGES):
        y = 6.5 - 0.5 * rank
        axes.text(0.8, y + 0.2, f"rank {rank}", ha="right", va="center", fontsize=_FONT)
        for tick in range(table.num_ticks):
            for half, (microbatches, color) in enumerate(
                (
                    (table.forward_microbatch, _BLUE),
                    (table.backward_microbatch, _ORANGE),
                )
            ):
                number = int(microbatches[tick, rank])
                box(
                    axes,
                    0.9 + width * (tick + half / 2),
                    y,
                    width / 2,
                    0.42,
                    "" if number < 0 else f"{'FB'[half]}{number}",
                    "white" if number < 0 else color,
                )
    left = 0.9 + width * TICK
    axes.plot(
        [left, left + width, left + width, left, left],
        [4.92, 4.92, 7.0, 7.0, 4.92],
        color="#b00020",
        linewidth=1.6,
    )
    axes.text(
        0,
        4.4,
        f"tick {TICK}: every rank runs this program, on its own "
        "microbatches and slots of its buffers",
        fontsize=11,
    )
    moments = ("forward", "loss", "backward", "hops")
    for column, moment in enumerate(moments):
        axes.text(0.9 + 2.32 * column, 3.95, moment, fontsize=_FONT, weight="bold")
    for rank in range(STAGES):
        y = 2.95 - 0.96 * rank
        axes.text(0.8, y + 0.4, f"rank {rank}", ha="right", va="center", fontsize=_FONT)
        for column, text in enumerate(tick_words(table, rank)):
            color = (_BLUE, _GREEN, _ORANGE, _GREY)[column]
            color = color if text else "white"
            box(axes, 0.9 + 2.32 * column, y, 2.2, 0.8, text, color)
    return figure


def tick_words(table: Any, rank: int) -> list[str]:
    """Return what a rank does in the moments of the tick that is drawn."""
    entry = {
        name: int(getattr(table, name)[TICK, rank].max())
        for name in (
            *("forward_microbatch", "input_read", "saved_write", "loss_write"),
            *("backward_microbatch", "saved_read", "gradient_read"),
            *("input_write", "gradient_write"),
        )
    }
    forward = backward = loss = ""
    if entry["forward_microbatch"] >= 0:
        source = "the batch" if rank == 0 else f"input slot {entry['input_read']}"
        forward = (
            f"stage {rank}, microbatch {entry['forward_microbatch']}\nreads {source}, "
            f"keeps saved slot {entry['saved_write']}"
        )
    if entry["loss_write"] >= 0:
        loss = f"gradient of the loss\nto gradient slot {entry['loss_write']}"
    if entry["backward_microbatch"] >= 0:
        backward = (
            f"microbatch {entry['backward_microbatch']}: reads saved slot "
            f"{entry['saved_read']}\nand gradient slot {entry['gradient_read']}"
        )
    arrivals = [
        f"{name} from rank {sender} to slot {entry[key]}"
        for name, key, sender in (
            ("activation", "input_write", rank - 1),
            ("gradient", "gradient_write", rank + 1),
        )
        if entry[key] >= 0
    ]
    return [forward, loss, backward, "\n".join(arrivals)]


def audit_figure(report: AuditReport) -> Figure:
    """Draw three collectives on their way from the program to the report."""
    wanted = ("FSDP gather of parameters", "row-parallel output", "global norm")
    rows = [
        next(row for row in report.rows if row.reason.startswith(words))
        for words in wanted
    ]
    columns = (
        ("text: hlo.py, collectives.py", lambda row: hlo_words(row.collective)),
        ("groups: mesh axes", lambda row: axes_words(row.collective, report)),
        ("who asked: reasons.py, needs.py", reason_words),
        ("cost: report.py, tables.py", lambda row: cost_words(row.collective)),
    )
    figure, axes = canvas(10.2, 5.4)
    axes.text(
        0,
        5.15,
        f"{report.layout}: subject.py traces and lowers the step, "
        "targets.py compiles it",
        fontsize=11,
    )
    for column, (head, words) in enumerate(columns):
        left = 2.6 * column
        axes.text(left, 4.6, head, fontsize=_FONT, weight="bold")
        for place, row in enumerate(rows):
            y = 3.3 - 1.5 * place
            color = (_GREY, _BLUE, _ORANGE, _GREEN)[column]
            box(axes, left, y, 2.35, 1.15, words(row), color)
            if column:
                arrow(axes, (left - 0.25, y + 0.575), (left, y + 0.575))
    return figure


def hlo_words(one: Any) -> str:
    """Return the program's instruction in short, and JAX's path of it."""
    dims = " ".join(f"{one.dtype}[{','.join(map(str, shape))}]" for shape in one.dims)
    parts = one.op_path.split("/")
    path = f"{'/'.join(parts[:2])}/.../\n{'/'.join(parts[-2:])[-52:]}"
    return f"{one.kind} {dims[:40]}\n{path}"


def axes_words(one: Any, report: AuditReport) -> str:
    """Return the mesh axes that the groups of a collective are."""
    sizes = ", ".join(f"{axis}={report.mesh_shape[axis]}" for axis in one.mesh_axes)
    return f"groups of {one.group_size} devices are\nthe mesh axes {sizes}"


def reason_words(row: Any) -> str:
    """Return the reason, and the line that made the collective."""
    return f"{row.reason}\n{source(row.collective)}\n" + (
        "a surprise" if row.surprise else "expected"
    )


def cost_words(one: Any) -> str:
    """Return the bytes of a collective, and how often it runs."""
    return (
        f"{one.payload_bytes:,} bytes of result\n{one.wire_bytes:,} bytes sent by a "
        f"device\n{one.executions} times in a step"
    )


def source(one: Any) -> str:
    """Return the file of the library that made a collective."""
    path, _, line = one.source.rpartition(":")
    name = path.rpartition("meshpar/")[2]
    return name if line else one.source


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure whose units are inches."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set(xlim=(-0.1, width), ylim=(-0.1, height))
    axes.axis("off")
    return figure, axes


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str
) -> None:
    """Draw a box with text in it, its lines wrapped to the width."""
    edge = "#bbbbbb" if text else "#eeeeee"
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=edge))
    lines = [textwrap.wrap(line, int(16 * width)) for line in text.splitlines()]
    axes.text(
        x + width / 2,
        y + height / 2,
        "\n".join(line for wrapped in lines for line in wrapped),
        ha="center",
        va="center",
        fontsize=_FONT - 1,
    )


def arrow(axes: Axes, start: Iterable[float], end: Iterable[float]) -> None:
    """Draw an arrow."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#555555"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
