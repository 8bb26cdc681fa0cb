"""Says how wrong the planner has been on published runs."""

from __future__ import annotations

import argparse
import json

from meshpar.planner import validate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subcommand's options."""
    parser.add_argument(
        "--validate",
        action="store_true",
        required=True,
        help="print the error against published runs, row by row",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the table; 0 if every target is met, 1 if one is missed."""
    rows = validate.rows()
    print(json.dumps(validate.as_json(rows)) if args.json else validate.text(rows))
    return 0 if all(summary.met for summary in validate.summaries(rows)) else 1
