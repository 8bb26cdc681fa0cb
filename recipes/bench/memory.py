"""Compare the memory of a training step by formula with the compiler's.

    python -m recipes.bench.memory

compiles `--preset` with AdamW for absent GPUs (`--target`; the extra `aot` is needed, a
GPU is not), under every ZeRO stage and recomputation, and prints a row for each. About
15 s a row on 2 cores; the default 12 rows take 3 to 6 minutes.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import shlex
import sys

import jax
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import meshpar
from meshpar import MemoryReport
from meshpar.models.presets import build

STATES = ("zero=0", "zero=1", "zero=2", "zero=3")
REMATS = ("none", "selective", "full")
_LOW = "precision=bf16,param_dtype=bf16"


def main(argv: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.memory")
    parser.add_argument("--preset", default="llama3.2-1b")
    parser.add_argument(
        "--fsdp", type=int, default=8, help="devices that split the states"
    )
    parser.add_argument("--target", default="gpu:h100:1x8")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    args = parser.parse_args(argv)
    model = build(args.preset)
    lines = [
        f"fsdp={args.fsdp},{zero},remat={remat},{_LOW}"
        for zero in STATES
        for remat in REMATS
    ]
    reports = [_report(model, line, args) for line in track(lines, "compiling")]
    print(
        f"{args.preset}, {args.global_batch} sequences of {args.seq}, compiled for "
        f"{args.target}; Python {platform.python_version()}, jax {jax.__version__}; "
        f"{datetime.date.today()}"
    )
    print(shlex.join(["python", "-m", "recipes.bench.memory", *sys.argv[1:]]))
    Console(width=140).print(memory_table(reports))
    return 0


def _report(model: meshpar.Model, line: str, args: argparse.Namespace) -> MemoryReport:
    layout = meshpar.Layout.parse(line)
    step = meshpar.make_train_step(
        model, optax.adamw(1e-4), layout, mesh=meshpar.absent_mesh(layout)
    )
    batch = meshpar.batch_shapes(args.global_batch, args.seq)
    return meshpar.memory_report(step, batch, target=args.target)


def memory_table(reports: list[MemoryReport]) -> Table:
    """A row for each report, in GB per device."""
    names = list(dict.fromkeys(part.name for one in reports for part in one.parts))
    table = Table(box=None, pad_edge=False)
    table.add_column("layout", overflow="fold", max_width=44)
    for name in (*names, "formula", "compiled", "difference"):
        table.add_column(name, justify="right", overflow="fold")
    for report in reports:
        bytes_of = {part.name: part.formula_bytes for part in report.parts}
        table.add_row(
            report.layout.removesuffix("," + _LOW),
            *(f"{bytes_of.get(name, 0) / 1e9:.2f}" for name in names),
            f"{report.formula_bytes / 1e9:.2f}",
            f"{report.peak_bytes / 1e9:.2f}",
            f"{report.difference:+.1%}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
