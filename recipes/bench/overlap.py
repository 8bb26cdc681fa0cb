"""What compiled steps hide, as the table that the planner reads.

    python -m recipes.bench.overlap
    python -m recipes.bench.overlap --target gpu

compiles a step for each case on hardware that need not be there (the extra `aot` is
needed), reads from each scheduled program which collectives have a matmul between their
start and their done, prints the shares and writes `meshpar/planner/overlap.json`; rows
of targets that were not asked for stay. A case takes half a minute for the GPUs and
some minutes for the TPUs, on 2 cores.
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

TARGETS = ("gpu:h100:8x8", "tpu:v5p:4x4x4")
FILE = Path(__file__).parents[2] / "meshpar" / "planner" / "overlap.json"


class Case(NamedTuple):
    """A step to compile.

    Args:
        preset: The model.
        layout: Without its precision, which is bf16.
        batch: Sequences in a step.
    """

    preset: str
    layout: str
    batch: int


CASES = (
    Case("llama3-8b", "fsdp=64,remat=full", 64),
    Case("llama3-8b", "fsdp=8,tensor=8,sequence_parallel=true,remat=full", 32),
    Case("llama3-8b", "data=2,stage=4,tensor=8,microbatches=8,remat=full", 64),
)


def main(argv: list[str] | None = None) -> int:
    """Compiles every case, prints the table and writes the file."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.overlap")
    parser.add_argument("--target", default="", help="of these alone: gpu, tpu")
    parser.add_argument("--out", type=Path, default=FILE, help=f"({FILE})")
    args = parser.parse_args(argv)
    targets = [target for target in TARGETS if args.target in target]
    if not targets:
        known = ", ".join(TARGETS)
        raise InputError(f"--target {args.target!r} is part of none of {known}")
    kept = [row for row in _written(args.out) if row["target"] not in targets]
    rows = [*kept]
    for target in targets:
        for case in CASES:
            rows += rows_of(*_audited(case, target))
    print(_conditions())
    Console(width=150).print(table(rows))
    text = json.dumps({"conditions": _conditions(), "rows": rows}, indent=1)
    args.out.write_text(text + "\n")
    return 0


def command_of(case: Case, target: str) -> list[str]:
    """The audit of a case, as the command line has it."""
    return [
        *(
            "audit",
            "--preset",
            case.preset,
            "--layout",
            f"{case.layout},precision=bf16",
        ),
        *("--target", target, "--global-batch", str(case.batch), "--seq", "4096"),
        *("--timeout", "1800", "--json"),
    ]


def rows_of(report: dict[str, Any], command: list[str]) -> list[dict[str, Any]]:
    """A row for each mesh axis and kind of collective of an audit's report.

    Collectives over several mesh axes, and those of the loss's few numbers, are left
    out.
    """
    sums: dict[tuple[str, str], list[float]] = {}
    for one in report["collectives"]:
        if len(one["mesh_axes"] or ()) != 1:
            continue
        sent = one["wire_bytes"] * one["executions"]
        found = sums.setdefault((one["mesh_axes"][0], one["kind"]), [0, 0])
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
            "command": shlex.join(["meshpar", *command]),
        }
        for (axis, kind), (sent, hidden) in sums.items()
        if sent > _FEW_BYTES
    ]


_FEW_BYTES = 1e8


def table(rows: Iterable[dict[str, Any]]) -> Table:
    """The rows for people."""
    found = Table(box=None, pad_edge=False)
    for heading in ("target", "layout", "mesh axis", "kind"):
        found.add_column(heading)
    for heading in ("GB sent", "hidden"):
        found.add_column(heading, justify="right")
    for row in rows:
        words = (row["target"], row["layout"], row["mesh_axis"], row["kind"])
        found.add_row(*words, f"{row['wire_bytes'] / 1e9:.1f}", f"{row['share']:.0%}")
    return found


def _audited(case: Case, target: str) -> tuple[dict[str, Any], list[str]]:
    command, printed = command_of(case, target), io.StringIO()
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
