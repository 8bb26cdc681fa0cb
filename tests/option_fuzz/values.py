"""Values for any option, and every option of every command from its own parser."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from meshpar.cli.main import SUBCOMMANDS
from meshpar.cli.parsing import OneLineParser
from meshpar.recipes.finetune import FinetuneConfig
from meshpar.recipes.options import CommandLine, RunConfig

VALUES: Mapping[str, str] = {
    "zero": "0",
    "one": "1",
    "prime": "4093",
    "minus one": "-1",
    "huge": str(10**30),
    "beyond floats": "1e400",
    "not a number": "nan",
    "infinite": "inf",
    "empty": "",
    "control characters": "\x1b[31m\n\r\u202eé日",
    "other bytes": "a\udcffb",
    "above the folder": "../../x",
    "file of others": "/etc/passwd",
    "folder": "a_folder",
    "file": "a_file.txt",
    "below a file": "a_file.txt/x",
    "bucket": "s3://bucket/x",
    "long": "x" * 100_000,
    "list": "[1]",
    "pairs": "a=1,b=,=,a=2",
}
"""Name -> a value. Folders and files of those names lie in the working directory."""

TO_FILES = ("html", "plot", "trace", "output", "log_json")
"""Options whose value needs a suffix to get beyond the first check."""


@dataclass(frozen=True)
class Option:
    """An option of a command.

    Args:
        command: `finetune`, or a subcommand of `meshpar`.
        name: Such as `--seq`; of a word without one what the parser calls it.
    """

    command: str
    name: str

    def words(self, value: str) -> list[str]:
        """Return what gives it that value on a command line."""
        return [f"{self.name}={value}"] if self.name.startswith("--") else [value]


def options() -> Iterator[Option]:
    """Yield every option: argparse's own, and the fields of the recipes' configs."""
    for command in SUBCOMMANDS:
        if command != "train":
            yield from _of_parser(command)
    for command, kinds in (
        ("train", (CommandLine, RunConfig)),
        ("finetune", (FinetuneConfig,)),
    ):
        for kind in kinds:
            for field in fields(kind):
                if field.name != "run":
                    yield Option(command, f"--{field.name.replace('_', '-')}")


def _of_parser(command: str) -> Iterator[Option]:
    parser = OneLineParser(prog=command)
    importlib.import_module(f"meshpar.cli.{command}").add_arguments(parser)
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        names = action.option_strings or [action.dest]
        yield Option(command, max(names, key=len))
