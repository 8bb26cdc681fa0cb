"""The `meshpar` command: parses, runs a subcommand, and says how it ended.

Exit status: 0 done, 1 the answer is "no", 2 bad input (one clear line on stderr), 70 a
fault of meshpar itself, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

import meshpar
from meshpar.cli.parsing import (
    OneLineParser,
    OptionsError,
    asks_json,
    one_line,
    print_error,
)
from meshpar.distributed.endings import leave
from meshpar.errors import InputError, escape_unencodable, nearest, print_fault

DONE, NO, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

SUBCOMMANDS = (
    "lint",
    "schedule",
    "estimate",
    "plan",
    "show",
    "calibrate",
    "audit",
    "fuzz",
    "train",
    "generate",
    "inspect",
    "export",
)
"""Each is a module here, with `add_arguments`, `run`, and `EXAMPLE` and `STATUSES`.

None imports JAX before it runs: help, a misspelt option and what needs only arithmetic
wait for nothing.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    escape_unencodable(sys.stdout)
    if argv[:1] == ["train"]:  # It reads its options itself, as a recipe.
        return importlib.import_module("meshpar.cli.train").main(argv[1:])
    try:
        return _run(argv)
    except OptionsError as end:
        print_error(end.error, as_json=asks_json(argv))
        raise


def _run(argv: Sequence[str]) -> int:
    command = f"meshpar {argv[0]}" if argv[:1] else "meshpar"
    try:
        args, unknown = _parser(argv).parse_known_args(argv)
        if unknown:
            args.parser.error_of_unknown(unknown)
        return args.run(args)
    except (InputError, OSError) as error:
        print(f"{command}: {one_line(error)}", file=sys.stderr)
        print_error(error, as_json=asks_json(argv))
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"{command}: stopped", file=sys.stderr)
        return leave(INTERRUPTED)
    except Exception as error:
        status = print_fault(command, error)
        print_error(error, as_json=asks_json(argv))
        return leave(status)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Of the subcommand that is asked for, or of all of them."""
    parser = OneLineParser(
        prog="meshpar",
        description=(meshpar.__doc__ or "").splitlines()[0],
        epilog="exit status: 0 done, 1 the answer is no, 2 bad input, 70 a fault "
        "of meshpar itself; "
        "`meshpar COMMAND --help` has more, and an example",
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action=_Version, help="print it and end")
    subparsers = parser.add_subparsers(
        dest="subcommand", required=True, metavar="COMMAND"
    )
    word = argv[0] if argv else ""
    if word.startswith("-") and word not in ("-h", "--help", "--version"):
        parser.error_of_unknown([word])
    if word and not word.startswith("-") and word not in SUBCOMMANDS:
        told = f"invalid choice: {word!r}; {nearest(word, SUBCOMMANDS)}"
        parser.error(told, "command.unknown_command")
    for name in (word,) if word in SUBCOMMANDS else SUBCOMMANDS:
        module = importlib.import_module(f"meshpar.cli.{name}")
        _add(subparsers, name, module)
    return parser


def _add(subparsers: argparse._SubParsersAction, name: str, module: ModuleType) -> None:
    summary = (module.__doc__ or "").strip().splitlines()[0]
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"example:\n  {module.EXAMPLE}\n\nexit status:\n  {module.STATUSES}",
    )
    module.add_arguments(parser)
    parser.set_defaults(run=module.run, parser=parser)


class _Version(argparse.Action):
    """Prints the versions that a report of a fault should have."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        python = ".".join(map(str, sys.version_info[:3]))
        print(f"meshpar {meshpar.__version__}, jax {version('jax')}, Python {python}")
        parser.exit(DONE)
