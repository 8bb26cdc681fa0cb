"""Trains a language model on a text, under any layout."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

_RECIPE = "meshpar.recipes.command"
"""What trains: looked up when the command runs, as the library imports no recipe."""

EXAMPLE = "meshpar train --text my_texts --layout data=2,fsdp=2,tensor=2 --steps 100"
STATUSES = (
    "0 done, 1 stopped by a bad step, 2 bad input, 75 another process has ended, "
    "130 saved and stopped by Ctrl-C, 143 by SIGTERM"
)


def main(argv: Sequence[str]) -> int:
    """Runs the recipe on its own options; its status is the command's.

    Args:
        argv: What follows `meshpar train`.
    """
    return importlib.import_module(_RECIPE).main(list(argv), command="meshpar train")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: the recipe reads its options itself."""


def run(args: argparse.Namespace) -> int:
    """Never called: `meshpar.cli.main` hands the words of `train` to `main` above."""
    return main([])
