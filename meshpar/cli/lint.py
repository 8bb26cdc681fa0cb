"""Check a model's rules against a layout, without running anything."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from meshpar.cli.options import (
    add_layout_arguments,
    add_model_arguments,
    chosen_layout,
    chosen_model,
)
from meshpar.cli.parsing import not_negative
from meshpar.errors import InputError, key_value_pairs, nearest
from meshpar.lint import LARGE_BYTES

# JAX, and what prints tables, are imported where a command runs: --help and a misspelt
# option wait for neither.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from meshpar.lint.findings import ParameterRow
    from meshpar.lint.lint import LintReport
    from meshpar.rules.rules import Rules

PRESET_NAMES = (
    "data_parallel",
    "fsdp",
    "hsdp",
    "tensor",
    "tensor_sequence",
    "fsdp_tensor",
    "fsdp_tensor_sequence",
)
"""The names of `meshpar.rules.presets.PRESETS`."""


EXAMPLE = "meshpar lint --preset llama3-70b --layout fsdp=8,tensor=8"
STATUSES = "0 no findings, 1 findings, 2 bad input"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add_model_arguments(parser)
    add_layout_arguments(parser)
    parser.add_argument(
        "--rules",
        metavar="RULES",
        help=f"{', '.join(PRESET_NAMES)}, or rules such as "
        "batch=data+fsdp,embed=none,mlp=tensor (default: those of the layout)",
    )
    parser.add_argument(
        "--large-bytes",
        type=not_negative,
        default=LARGE_BYTES,
        metavar="N",
        help="size from which a replicated parameter is a finding (default: "
        "%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if there are findings."""
    layout = chosen_layout(args)
    from meshpar.lint.lint import lint

    report = lint(
        chosen_model(args),
        layout,
        None if args.rules is None else parse_rules(args.rules),
        global_batch=args.global_batch,
        seq=args.seq,
        large_bytes=args.large_bytes,
    )
    if args.json:
        print(json.dumps(asdict(report)))
    else:
        _print_tables(report, str(layout))
    return 1 if report.findings else 0


def parse_rules(text: str) -> Rules | list[tuple[str, tuple[str, ...] | None]]:
    """Return a preset by name, or the pairs of `batch=data+fsdp,embed=none`.

    Raises:
        InputError: The text is neither.
    """
    from meshpar.rules.presets import PRESETS

    if "=" not in text:
        if text not in PRESETS:
            raise InputError(
                f"no rules {text!r}; {nearest(text, PRESETS)}",
                key="rules.unknown_preset",
            )
        return PRESETS[text]
    return rule_pairs(text, "--rules")


def rule_pairs(text: str, noun: str) -> list[tuple[str, tuple[str, ...] | None]]:
    """Return the logical axes and mesh axes of `batch=data+fsdp,embed=none`.

    Args:
        text: Value of the option.
        noun: Name of the option.

    Raises:
        InputError: A part is no such pair.
    """
    pairs = key_value_pairs(
        text,
        noun=noun,
        form="name=mesh axis",
        way_out="write none for replicated, + between several mesh axes",
    )
    return [
        (logical_axis, None if target == "none" else tuple(target.split("+")))
        for logical_axis, target in pairs
    ]


def parameter_table(rows: tuple[ParameterRow, ...]) -> Table:
    """Return a table of every parameter: shape, layout and bytes per device."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("parameter", "shape", "logical axes", "mesh axes", "local shape"):
        table.add_column(heading, overflow="fold")
    table.add_column("bytes/device", justify="right")
    for row in rows:
        table.add_row(
            row.path,
            _dims(row.shape),
            _dims(row.logical_axes),
            _dims(row.mesh_axes),
            _dims(row.local_shape),
            f"{row.bytes:,}",
        )
    total = sum(row.bytes for row in rows)
    table.add_section()
    table.add_row("all", "", "", "", "", f"{total:,}")
    return table


def wide_console() -> Console:
    """Return a console that does not cut tables when its output is a pipe."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=140)


def _print_tables(report: LintReport, layout: str) -> None:
    console = wide_console()
    console.print(f"layout {layout}", highlight=False)
    console.print(parameter_table(report.parameters))
    for line in report.note_lines:
        sys.stdout.write(f"{line}\n")
    if not report.findings:
        console.print("no findings", style="green")
    for finding in report.findings:
        sys.stdout.write(f"{finding.kind}: {finding.message}\n")


def _dims(entries: tuple) -> str:
    names = [
        "+".join(entry) if isinstance(entry, tuple) else entry for entry in entries
    ]
    return " ".join("-" if name is None else str(name) for name in names)
