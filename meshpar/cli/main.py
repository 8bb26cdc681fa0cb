"""The `meshpar` command: parses, runs a subcommand, and says how it ended.

Exit status: 0 done, 1 the answer is "no", 2 bad input (one clear line on stderr).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import meshpar
from meshpar.cli import audit, calibrate, estimate, fuzz, lint, plan, schedule
from meshpar.cli.parsing import OneLineParser

DONE, NO, BAD_INPUT = 0, 1, 2

_SUBCOMMANDS = {
    "lint": lint,
    "schedule": schedule,
    "estimate": estimate,
    "plan": plan,
    "calibrate": calibrate,
    "audit": audit,
    "fuzz": fuzz,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    args = _parser().parse_args(argv)
    try:
        return _SUBCOMMANDS[args.subcommand].run(args)
    except (meshpar.InputError, OSError) as error:
        print(f"meshpar {args.subcommand}: {error}", file=sys.stderr)
        return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="meshpar", description=meshpar.__doc__)
    subparsers = parser.add_subparsers(dest="subcommand", required=True)
    for name, module in _SUBCOMMANDS.items():
        summary = (module.__doc__ or "").strip().splitlines()[0]
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        module.add_arguments(subparser)
    return parser
