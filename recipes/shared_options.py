"""Options that recipes share: one meaning each, whichever recipe has it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshpar.cli.parsing import (
    OneLineParser,
    above_zero,
    not_negative,
    output_file,
    positive,
)
from meshpar.errors import install_extra

_SHARED: Mapping[str, Mapping[str, Any]] = {
    "layout": dict(metavar="LINE", help="layout of the devices"),
    "steps": dict(type=positive, metavar="N", help="optimizer steps"),
    "global_batch": dict(type=positive, metavar="N", help="examples per step"),
    "seq": dict(type=positive, metavar="N", help="tokens per example"),
    "seed": dict(type=not_negative, metavar="N", help="seed of all random numbers"),
    "learning_rate": dict(type=above_zero, metavar="RATE", help="peak learning rate"),
    "validate_every": dict(
        type=positive, metavar="N", help="steps between evaluations on held-out data"
    ),
    "save_every": dict(type=positive, metavar="N", help="steps between checkpoints"),
    "out": dict(
        type=Path, metavar="DIR", help="folder of the run: its metrics and other files"
    ),
    "log_json": dict(
        type=output_file,
        metavar="FILE",
        help="file of metrics, one JSON object per line (default: OUT/metrics.jsonl, "
        "if there is --out)",
    ),
    "png": dict(metavar="FILE", help=f"picture to draw ({install_extra('plots')})"),
}
"""Name of an option -> arguments of `add_argument`, without the recipe's default."""


class RecipeParser(OneLineParser):
    """Parser of a recipe with options that other recipes have too.

    Args:
        recipe: Name of the recipe's module.
        doc: The module's docstring, whose first line is the description.
        shared: Option -> the recipe's default.
        renamed: Old spelling of an option -> the shared one, which it is taken for
            until the next release.
        types: Option -> its type in this recipe, where that differs.
    """

    def __init__(
        self,
        recipe: str,
        doc: str | None,
        shared: Mapping[str, Any],
        renamed: Mapping[str, str] | None = None,
        types: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            prog=f"python -m recipes.{recipe}",
            description=(doc or "").splitlines()[0],
            allow_abbrev=False,
        )
        for name, default in shared.items():
            option = f"--{name.replace('_', '-')}"
            arguments = dict(_SHARED[name])
            if types and name in types:
                arguments["type"] = types[name]
            self.add_argument(option, default=default, **arguments)
        self._renamed = dict(renamed or {})

    def parse_options(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the options of a command line; unknown ones end the program."""
        words = sys.argv[1:] if argv is None else argv
        args, unknown = self.parse_known_args([self._known(word) for word in words])
        if unknown:
            self.refuse_unknown(unknown)
        return args

    def _known(self, word: str) -> str:
        """Return a word of the command line with the new spelling of its option."""
        option, equals, value = word.partition("=")
        if option not in self._renamed:
            return word
        deprecated(option, self._renamed[option])
        return f"{self._renamed[option]}{equals}{value}"


def deprecated(old: str, new: str) -> None:
    """Print that an option has another spelling now."""
    line = f"warning: {old} is now {new}; the next release does not take {old} any more"
    print(line, file=sys.stderr)


def metrics_file(args: argparse.Namespace) -> Path | None:
    """Return the file of a run's metrics, whose folder is made; None for no file."""
    if args.log_json is not None:
        return Path(args.log_json)
    if args.out is None:
        return None
    args.out.mkdir(parents=True, exist_ok=True)
    return args.out / "metrics.jsonl"
