"""List what a checkpoint has: layout, step, options, position in the data, arrays."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from meshpar.cli.options import add_checkpoint_argument
from meshpar.cli.parsing import not_negative
from meshpar.errors import local_path, printable

if TYPE_CHECKING:
    from meshpar.train.checkpoint.contents import Contents

EXAMPLE = "meshpar inspect runs/mine"
STATUSES = "0 done, 1 it is damaged, 2 bad input"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add_checkpoint_argument(parser)
    add = parser.add_argument
    add(
        "--step",
        type=not_negative,
        metavar="N",
        help="step of the run (default: the newest)",
    )
    add("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Read and print; return 1 if the files are damaged."""
    from meshpar.train.checkpoint.contents import read_contents

    found = read_contents(local_path("checkpoint", args.checkpoint), args.step)
    if args.json:
        print(json.dumps(found.as_dict()))
    else:
        _print(found)
    if found.damage:
        damage = printable(str(found.damage))
        print(f"step {found.step} is damaged: {damage}", file=sys.stderr)
    return 1 if found.damage else 0


def _print(found: Contents) -> None:
    from rich.table import Table

    from meshpar.cli.lint import wide_console

    console = wide_console()

    def say(line: str) -> None:
        line = printable(line)
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    steps = ", ".join(map(str, found.steps))
    say(f"step {found.step} of {found.directory} (there are {steps})")
    say(f"layout {found.layout}")
    if not found.has_checksums:
        say("checksums none, so damage to its files cannot be detected")
    for name, values in (("config", found.config), ("data", found.data)):
        told = [f"{key}={value}" for key, value in values.items() if value is not None]
        say(f"{name} {', '.join(told)}")
    table = Table("array", "shape", "dtype", box=None, pad_edge=False)
    table.add_column("bytes", justify="right")
    for one in found.arrays:
        shape = " ".join(map(str, one.shape))
        table.add_row(printable(one.path), shape, one.dtype, f"{one.bytes:,}")
    table.add_row("all", "", "", f"{sum(one.bytes for one in found.arrays):,}")
    console.print(table)
