"""The `meshpar` command: parse the words, run a subcommand, and return its status.

Exit status: 0 done, 1 the answer is "no", 2 bad input (one clear line on stderr), 70 a
bug in meshpar, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import meshpar
from meshpar.cli.parsing import (
    OneLineParser,
    OptionsError,
    asks_json,
    one_line,
    print_error,
)
from meshpar.errors import InputError, escape_unencodable, nearest, print_fault

DONE, NO, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

TRAIN = "train"
"""Subcommand of a recipe, which reads its options itself."""

SUBCOMMANDS = (
    "lint",
    "name",
    "schedule",
    "estimate",
    "plan",
    "show",
    "calibrate",
    "audit",
    "fuzz",
    TRAIN,
    "generate",
    "inspect",
    "export",
    "doctor",
)
"""All but `train` are modules here, with `add_arguments`, `run`, `EXAMPLE`, `STATUSES`.

None imports JAX before it runs, so that help, a misspelt option and arithmetic do not
wait for it.
"""

_RECIPE = "meshpar.recipes.command"
"""Module that trains; the library imports no recipe before it runs."""

_RECIPE_CONFIG = "meshpar.recipes.config"
"""Module of its options."""

_COMPLETION = "--print-completion"

_TRAIN_SUMMARY = "Train a language model on a text, under any layout."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    escape_unencodable(sys.stdout)
    if argv[:1] == [TRAIN]:
        recipe = importlib.import_module(_RECIPE)
        return recipe.main(argv[1:], command="meshpar train")
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
            args.parser.refuse_unknown(unknown)
        return args.run(args)
    except (InputError, OSError) as error:
        print(f"{command}: {one_line(error)}", file=sys.stderr)
        print_error(error, as_json=asks_json(argv))
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"{command}: stopped", file=sys.stderr)
        return _leave(INTERRUPTED)
    except Exception as error:
        status = print_fault(command, error)
        print_error(error, as_json=asks_json(argv))
        return _leave(status)


def _leave(status: int) -> int:
    """End a process of a job at once; a single process returns its exit status."""
    from meshpar.distributed.endings import leave  # It loads sockets and threads.

    return leave(status)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the subcommand that `argv` names, or of all of them."""
    parser = OneLineParser(
        prog="meshpar",
        description=(meshpar.__doc__ or "").splitlines()[0],
        epilog="exit status: 0 done, 1 the answer is no, 2 bad input, 70 a bug in "
        "meshpar; `meshpar COMMAND --help` has options and an example",
    )
    parser.set_defaults(parser=parser)
    parser.add_argument(
        "--version", action=_Version, help="print the versions and exit"
    )
    parser.add_argument(
        _COMPLETION,
        action=_Completion,
        choices=("bash", "zsh", "tcsh"),
        help="print the shell's completion of all commands and exit",
    )
    subparsers = parser.add_subparsers(
        dest="subcommand", required=True, metavar="COMMAND"
    )
    word = argv[0] if argv else ""
    options = ("-h", "--help", "--version", _COMPLETION)
    if word.startswith("-") and word.partition("=")[0] not in options:
        parser.refuse_unknown([word])
    if word and not word.startswith("-") and word not in SUBCOMMANDS:
        message = f"invalid choice: {word!r}; {nearest(word, SUBCOMMANDS)}"
        parser.error(message, "command.unknown_command")
    if word not in SUBCOMMANDS:
        for name in SUBCOMMANDS:
            subparsers.add_parser(name, help=_summary(name))
        return parser
    _add_subcommand(subparsers, word)
    return parser


def _add_subcommand(subparsers: Any, name: str) -> None:
    """Add the parser of a subcommand that is a module here."""
    module = importlib.import_module(f"meshpar.cli.{name}")
    subparser = subparsers.add_parser(
        name,
        help=_summary(name),
        description=_summary(name),
        epilog=f"example:\n  {module.EXAMPLE}\n\nexit status:\n  {module.STATUSES}",
    )
    module.add_arguments(subparser)
    subparser.set_defaults(run=module.run, parser=subparser)


def _whole_parser() -> argparse.ArgumentParser:
    """Return a parser with the options of every subcommand, for completion."""
    parser = OneLineParser(prog="meshpar")
    parser.add_argument("--version", action="store_true", help="print it and end")
    subparsers = parser.add_subparsers(dest="subcommand", metavar="COMMAND")
    for name in SUBCOMMANDS:
        if name != TRAIN:
            _add_subcommand(subparsers, name)
            continue
        train = subparsers.add_parser(TRAIN, help=_TRAIN_SUMMARY)
        for option in importlib.import_module(_RECIPE_CONFIG).OPTIONS:
            train.add_argument(f"--{option.replace('_', '-')}")
    return parser


def _summary(name: str) -> str:
    """Return the first line of a subcommand's docstring, without importing it."""
    if name == TRAIN:
        return _TRAIN_SUMMARY
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return source.split('"""', 2)[1].splitlines()[0]


class _Version(argparse.Action):
    """Print the versions that a report of a fault needs."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        python = ".".join(map(str, sys.version_info[:3]))
        print(f"meshpar {meshpar.__version__}, jax {version('jax')}, Python {python}")
        parser.exit(DONE)


class _Completion(argparse.Action):
    """Print the completion script of a shell, made by shtab."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        import shtab

        print(shtab.complete(_whole_parser(), values))
        parser.exit(DONE)
