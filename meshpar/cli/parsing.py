"""Options that subcommands share, and bad options told in one line."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any, NoReturn

from meshpar.layout import Layout
from meshpar.model import Model


class OneLineParser(argparse.ArgumentParser):
    """Ends on bad input with one line on stderr and status 2."""

    def error(self, message: str) -> NoReturn:
        """Prints the line and exits."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose a model."""
    parser.add_argument("--preset", metavar="NAME", help="a named model")
    parser.add_argument(
        "--model",
        metavar="SIZES",
        help="layers=4,hidden=256,heads=8,... (with --preset: what differs from it), "
        "or the path of a Hugging Face config.json",
    )
    parser.add_argument(
        "--model-from",
        metavar="MODULE:FUNCTION",
        default="models.presets:build",
        help="what builds the model, called with preset= and the sizes "
        "(default: %(default)s, found from a checkout)",
    )


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose a layout and a batch."""
    parser.add_argument(
        "--layout", metavar="LINE", required=True, help="data=2,fsdp=2,tensor=2"
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="devices, where the layout has a -1"
    )
    parser.add_argument(
        "--global-batch", type=int, metavar="N", help="sequences in a step"
    )
    parser.add_argument(
        "--seq", type=int, default=128, metavar="N", help="tokens of one"
    )


def layout_of(args: argparse.Namespace) -> Layout:
    """The layout of the options.

    Raises:
        ValueError: It cannot be read, or does not fit `--devices`.
    """
    layout = Layout.parse(args.layout)
    return layout if args.devices is None else layout.resolve(args.devices)


def model_of(args: argparse.Namespace) -> Model:
    """The model of the options.

    Raises:
        ValueError: There is no such builder, preset or size.
    """
    build = _import_function(args.model_from)
    chosen: dict[str, Any] = {}
    if args.preset:
        chosen["preset"] = args.preset
    if args.model and Path(args.model).suffix == ".json":
        chosen["config_json"] = args.model
    elif args.model:
        chosen.update(parse_sizes(args.model))
    if not chosen and args.model_from == "models.presets:build":
        raise ValueError("no model is chosen; give --preset NAME or --model SIZES")
    return build(**chosen)


def parse_sizes(text: str) -> dict[str, int | float | bool | str]:
    """`layers=4,tied=true` as a dict.

    Raises:
        ValueError: A part is not key=value, or a key is given twice.
    """
    sizes: dict[str, int | float | bool | str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ValueError(
                f"--model {text!r}: {part.strip()!r} is not key=value; write for example "
                "layers=4,hidden=256"
            )
        if key in sizes:
            raise ValueError(f"--model {text!r}: {key!r} is given twice; give it once")
        sizes[key] = _parse_scalar(value)
    return sizes


def _parse_scalar(text: str) -> int | float | bool | str:
    if text in ("true", "false"):
        return text == "true"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _import_function(name: str) -> Any:
    module_name, colon, function = name.partition(":")
    if not colon or not function:
        raise ValueError(
            f"--model-from {name!r}: write module:function, such as models.presets:build"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--model-from {name!r}: {error}; run from the checkout that holds it, or "
            "name a function of an installed module"
        ) from error
