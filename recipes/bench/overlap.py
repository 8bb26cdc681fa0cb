"""Measure the communication that compiled steps hide, as the planner's table.

    python -m recipes.bench.overlap
    python -m recipes.bench.overlap --target gpu --layout data=

compiles a step for each case on hardware that need not be there (the extra `aot` is
needed), reads from each scheduled program which collectives have a matmul between their
start and their done, prints the shares and writes `meshpar/planner/overlap.json`; rows
of targets and layouts that were not asked for stay. A case takes half a minute for the
GPUs and up to some minutes for the TPUs, on 2 cores.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from meshpar.cli.main import main as meshpar_main
from meshpar.errors import InputError
from meshpar.hardware.platforms import PLATFORMS
from meshpar.layout import Layout

SEQ = 4096
TARGETS = ("gpu:h100:8x8", "tpu:v5p:4x4x4")
GPUS = TARGETS[:1]
FILE = Path(__file__).parents[2] / "meshpar" / "planner" / "overlap.json"


class Case(NamedTuple):
    """A step to compile.

    Args:
        preset: The model.
        layout: Without its precision, which is bf16.
        batch: Sequences in a step.
        seq: Tokens of a sequence.
        model: Sizes to change of the preset. A program that does not fit its devices
            hides less.
        targets: Machines to compile for.
    """

    preset: str
    layout: str
    batch: int
    seq: int = SEQ
    model: str = ""
    targets: tuple[str, ...] = TARGETS


CASES = (
    Case("llama3-8b", "fsdp=64,remat=full", 64),
    Case("llama3-8b", "fsdp=8,tensor=8,sequence_parallel=true,remat=full", 32),
    # One example a device: no block is taken in parts of the batch.
    Case("llama3-8b", "fsdp=8,tensor=8,sequence_parallel=true,remat=full", 8),
    Case("llama3-8b", "data=8,tensor=8,sequence_parallel=true,remat=full", 32),
    Case("llama3-8b", "data=8,tensor=8,zero=1,sequence_parallel=true,remat=full", 64),
    Case("llama3-8b", "data=64,zero=1,remat=full", 64),
    Case("llama3-8b", "data=2,stage=4,tensor=8,microbatches=8,remat=full", 64),
    Case("llama3-8b", "data=16,stage=4,microbatches=8,remat=full", 128),
    # Sums of gradients, and microbatches, which on TPUs hide no reduction.
    Case("llama3-8b", "data=64,remat=full", 64, model="layers=8", targets=GPUS),
    Case(
        "llama3-8b",
        "data=64,microbatches=4,remat=full",
        256,
        model="layers=8",
        targets=GPUS,
    ),
    Case("llama3-8b", "data=64,microbatches=4,zero=1,remat=full", 256, targets=GPUS),
    Case("llama3-8b", "fsdp=64,microbatches=4,remat=full", 256, targets=GPUS),
    Case(
        "llama3-8b",
        "data=8,tensor=8,microbatches=4,zero=1,sequence_parallel=true,remat=full",
        256,
        targets=GPUS,
    ),
    # Experts of one host and of several.
    Case(
        "mixtral-8x7b",
        "expert=8,remat=full",
        16,
        seq=2048,
        model="layers=16",
        targets=("gpu:h100:1x8",),
    ),
    Case("qwen3-30b-a3b", "expert=64,remat=full", 64, targets=GPUS),
    # Around a ring: splash attention on TPUs, our own tiles on GPUs.
    Case(
        "llama3-8b",
        "fsdp=4,context=16,zero_axes=fsdp/context,remat=save:attention_mixed",
        4,
        seq=262_144,
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Compiles every case, prints the table and writes the file."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.overlap")
    parser.add_argument("--target", default="", help="targets to measure: gpu or tpu")
    parser.add_argument(
        "--layout", default="", help="measure layouts with this text only"
    )
    parser.add_argument("--out", type=Path, default=FILE, help=f"({FILE})")
    args = parser.parse_args(argv)
    known_targets = list(dict.fromkeys(target for target, _ in targeted_cases()))
    targets = [target for target in known_targets if args.target in target]
    if not targets:
        known = ", ".join(known_targets)
        raise InputError(
            f"--target {args.target!r} matches none of {known}",
            key="command.unknown_target",
        )
    cases = [case for case in CASES if args.layout in case.layout]
    if not cases:
        known = "; ".join(case.layout for case in CASES)
        raise InputError(
            f"--layout {args.layout!r} matches none of {known}",
            key="command.unknown_layout",
        )
    rows = _rows(targets, cases, _written(args.out))
    print(_conditions())
    Console(width=150).print(table(rows))
    text = json.dumps({"conditions": _conditions(), "rows": rows}, indent=1)
    args.out.write_text(text + "\n")
    return 0


def _rows(
    targets: list[str], cases: list[Case], written: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the rows of all targets in order, those of `targets` anew."""
    rows = []
    for target, case in targeted_cases():
        if target in targets and case in cases:
            report, command = _audited(case, target)
            rows += table_rows(report, command, num_parts=count_parts(case, target))
        else:
            command = _text(audit_command(case, target))
            rows += [row for row in written if row["command"] == command]
    return rows


def targeted_cases() -> list[tuple[str, Case]]:
    """Return each target of each case, all of one platform after another."""
    return [
        (target, case)
        for platform in PLATFORMS
        for case in CASES
        for target in case.targets
        if target.startswith(f"{platform}:")
    ]


def audit_command(case: Case, target: str) -> list[str]:
    """The audit of a case, as the command line has it."""
    return [
        *(
            "audit",
            "--preset",
            case.preset,
            *(("--model", case.model) if case.model else ()),
            "--layout",
            f"{case.layout},precision=bf16",
        ),
        *(
            "--target",
            target,
            "--global-batch",
            str(case.batch),
            "--seq",
            str(case.seq),
        ),
        *("--timeout", "1800", "--json"),
    ]


def count_parts(case: Case, target: str) -> int:
    """In how many parts of the batch the case's blocks are taken."""
    layout = Layout.of(case.layout)
    if not layout.sequence_parallel:
        return 1
    examples = case.batch // (layout.data * layout.fsdp * layout.microbatches)
    platform = PLATFORMS[target.partition(":")[0]]
    return platform.num_batch_parts(examples, examples * case.seq)


def table_rows(
    report: dict[str, Any], command: list[str], *, num_parts: int = 1
) -> list[dict[str, Any]]:
    """A row for each mesh axis and kind of collective of an audit's report.

    Collectives over several mesh axes, and those of the loss's few numbers, are left
    out. Those among neighbours along an axis, or others of its devices, are rows apart.
    """
    sums: dict[tuple[str, str, str], list[float]] = {}
    for one in report["collectives"]:
        axes, part = one["mesh_axes"] or (), ""
        if one.get("part"):
            axes, part = one["part"][:1], "inner" if one["part"][1] == 1 else "outer"
        if len(axes) != 1:
            continue
        sent = one["wire_bytes"] * one["executions"]
        found = sums.setdefault((axes[0], one["kind"], part), [0, 0])
        found[0] += sent
        found[1] += sent if one["matmul_flops"] else 0
    return [
        {
            "platform": report["target"].partition(":")[0],
            "mesh_axis": axis,
            "kind": kind,
            "share": round(hidden / sent, 3),
            "wire_bytes": round(sent),
            "target": report["target"],
            "layout": report["layout"],
            "command": _text(command),
            "num_parts": num_parts,
            **({"part": part} if part else {}),
        }
        for (axis, kind, part), (sent, hidden) in sums.items()
        if sent > _FEW_BYTES
    ]


_FEW_BYTES = 1e8


def _text(command: list[str]) -> str:
    return shlex.join(["meshpar", *command])


def table(rows: Iterable[dict[str, Any]]) -> Table:
    """The rows for people."""
    found = Table(box=None, pad_edge=False)
    for heading in ("target", "layout", "mesh axis", "kind"):
        found.add_column(heading)
    for heading in ("parts", "GB sent", "hidden"):
        found.add_column(heading, justify="right")
    for row in rows:
        words = (row["target"], row["layout"], row["mesh_axis"], row["kind"])
        numbers = (
            str(row["num_parts"]),
            f"{row['wire_bytes'] / 1e9:.1f}",
            f"{row['share']:.0%}",
        )
        found.add_row(*words, *numbers)
    return found


def _audited(case: Case, target: str) -> tuple[dict[str, Any], list[str]]:
    command, printed = audit_command(case, target), io.StringIO()
    with contextlib.redirect_stdout(printed):
        meshpar_main(command)
    return json.loads(printed.getvalue()), command


def _written(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def _conditions() -> str:
    versions = f"Python {platform.python_version()}, jax {jax.__version__}"
    return f"python -m recipes.bench.overlap; {versions}; {datetime.date.today()}"


if __name__ == "__main__":
    sys.exit(main())
