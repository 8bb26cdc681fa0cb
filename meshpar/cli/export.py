"""Write a checkpoint as safetensors that transformers loads."""

from __future__ import annotations

import argparse
import json

from meshpar.cli.options import add_checkpoint_argument
from meshpar.cli.parsing import import_function, positive

_EXPORT = "meshpar.models.convert.export:export"
"""Function that writes; the library imports no model before it runs."""

EXAMPLE = "meshpar export runs/mine --to mine-hf"
STATUSES = "0 done, 2 bad input"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add_checkpoint_argument(parser)
    add = parser.add_argument
    add(
        "--to",
        required=True,
        metavar="DIR",
        help="folder to write; created if absent (required)",
    )
    add(
        "--step",
        type=positive,
        metavar="N",
        help="step of the run (default: the newest)",
    )
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="dtype of the files (default: %(default)s)",
    )
    add(
        "--like",
        metavar="DIR",
        help="folder whose tokenizer files are copied (default: the tokenizer of the "
        "run's data, and other files of the starting weights if they have the same "
        "tokenizer)",
    )
    add(
        "--average",
        action="store_true",
        help="write the average of the parameters that the run kept, in place of the "
        "trained ones",
    )
    add("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Write the files, and print what was written."""
    export = import_function(_EXPORT, "export")
    found = export(
        args.checkpoint,
        args.to,
        step=args.step,
        dtype=args.dtype,
        like=args.like,
        average=args.average,
    )
    if args.json:
        print(json.dumps(found))
    else:
        print(
            f"step {found['step']} as {found['dtype']} in {found['folder']}: "
            f"{found['bytes']:,} bytes, {', '.join(found['files'])}"
        )
    return 0
