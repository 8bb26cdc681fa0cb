"""Options that subcommands share, and bad options told in one line."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any, NoReturn

from meshpar.errors import InputError
from meshpar.key_values import key_values
from meshpar.layout import MESH_AXES, Layout
from meshpar.model.contract import Model

_NO_SIZES = {
    "preset": "--preset NAME",
    "config_json": "--model PATH, of a file that ends in .json",
}
"""Arguments of a builder that have an option of their own, and which."""


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
        "--devices",
        type=positive,
        metavar="N",
        help="devices, where the layout has a -1",
    )
    parser.add_argument(
        "--global-batch", type=positive, metavar="N", help="sequences in a step"
    )
    parser.add_argument(
        "--seq", type=positive, default=128, metavar="N", help="tokens of one"
    )


def positive(text: str) -> int:
    """The whole number of an option that must be at least 1, as argparse's `type`.

    Raises:
        argparse.ArgumentTypeError: It is no whole number, or below 1.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a whole number of at least 1"
        )
    return number


def layout_of(args: argparse.Namespace) -> Layout:
    """The layout of the options.

    Raises:
        InputError: It cannot be read, does not fit `--devices`, or has a -1 without it.
    """
    layout = Layout.parse(args.layout)
    if args.devices is not None:
        return layout.resolve(args.devices)
    for axis in MESH_AXES:
        if getattr(layout, axis) == -1:
            raise InputError(
                f"mesh axis {axis!r} is -1, so its size depends on the devices; give "
                "--devices N, or give the axis a size"
            )
    return layout


def model_of(args: argparse.Namespace) -> Model:
    """The model of the options.

    Raises:
        InputError: There is no such builder, preset or size, or it builds no model.
    """
    build = import_function(args.model_from, "--model-from")
    chosen: dict[str, Any] = {}
    if args.preset:
        chosen["preset"] = args.preset
    if args.model and Path(args.model).suffix == ".json":
        chosen["config_json"] = args.model
    elif args.model:
        chosen.update(parse_sizes(args.model))
    if not chosen and args.model_from == "models.presets:build":
        raise InputError("no model is chosen; give --preset NAME or --model SIZES")
    try:
        model = build(**chosen)
    except InputError:
        raise
    except (TypeError, ValueError) as error:  # A user's own function raises its own.
        raise InputError(
            f"--model-from {args.model_from!r} cannot be called with "
            f"{', '.join(chosen) or 'nothing'}: {_first_line(error)}; give the sizes "
            "it takes, or name another function"
        ) from error
    if not isinstance(model, Model):
        raise InputError(
            f"--model-from {args.model_from!r} gives a {type(model).__name__}, not a "
            "meshpar.Model; name a function that returns one"
        )
    return model


def parse_sizes(text: str) -> dict[str, int | float | bool | str]:
    """`layers=4,tied=true` as a dict.

    Raises:
        InputError: A part is not key=value, a key is given twice, or it is no size.
    """
    values = key_values(text, noun="--model", example="layers=4,hidden=256")
    for key in values:
        if key in _NO_SIZES:
            raise InputError(
                f"--model {text!r}: {key!r} is no size; give {_NO_SIZES[key]}"
            )
    return {key: _parse_scalar(value) for key, value in values.items()}


def _parse_scalar(text: str) -> int | float | bool | str:
    if text in ("true", "false"):
        return text == "true"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def import_function(name: str, option: str) -> Any:
    """The function that an option names as `module:function`.

    Raises:
        InputError: It is not of that form, cannot be imported, or is no function.
    """
    module_name, colon, function = name.partition(":")
    if not colon or not function:
        raise InputError(
            f"{option} {name!r}: write module:function, such as models.presets:build"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"{option} {name!r}: {_first_line(error)}; run from the checkout that "
            "holds it, or name a function of an installed module"
        ) from error
    if not callable(found):
        raise InputError(
            f"{option} {name!r} is a {type(found).__name__}, not a function; name one"
        )
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
