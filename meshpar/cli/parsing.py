"""Options that subcommands share, and bad options told in one line."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from meshpar.errors import FAULT_KEY, InputError, fault_line, key_values, printable
from meshpar.layout import MESH_AXES, Layout

if TYPE_CHECKING:
    from meshpar.model.contract import Model

MODEL_FROM = "meshpar.models.presets:build"
"""What builds a model unless `--model-from` says otherwise."""

_NO_SIZES = {
    "preset": "--preset NAME",
    "config_json": "--model PATH, of a file that ends in .json",
}
"""Arguments of a builder that have an option of their own, and which."""

_MOST = 10**12
"""Of anything that an option counts: bytes of an array are the largest."""

_SHOWN = 40
"""Characters of a wrong value that its error quotes."""


class OptionsError(SystemExit):
    """Ends a command whose options argparse refuses, after the line is printed.

    Attributes:
        error: What is wrong with them.
    """

    def __init__(self, error: InputError) -> None:
        super().__init__(2)
        self.error = error


class OneLineParser(argparse.ArgumentParser):
    """Ends on bad input with one line on stderr and status 2; its help has defaults."""

    def __init__(self, **options: Any) -> None:
        self._options: list[str] = []
        super().__init__(**{"formatter_class": _Help, **options})

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Adds an option, whose names may be what another is misspelt for."""
        self._options += names
        return super().add_argument(*names, **options)

    def error(self, message: str, key: str | None = None) -> NoReturn:
        """Prints the line and exits.

        Args:
            message: What is wrong.
            key: Key of the error; by default that of the option's own error.
        """
        print(
            f"{self.prog}: {one_line(message)}; see {self.prog} --help", file=sys.stderr
        )
        raise OptionsError(InputError(message, key=key or _key_of(message)))

    def error_of_unknown(self, words: Sequence[str]) -> NoReturn:
        """Ends on words that are no options, with the nearest ones."""
        options = [word.partition("=")[0] for word in words if word.startswith("-")]
        close = [
            near
            for word in options
            for near in difflib.get_close_matches(word, self._options, n=1, cutoff=0.6)
        ]
        hint = f" (did you mean {', '.join(close)}?)" if close else ""
        told = f"unrecognized arguments: {' '.join(words)}{hint}"
        self.error(told, "command.unknown_option")


def _key_of(message: str) -> str:
    """Return the key of the option's own error, or of what argparse refuses."""
    error = sys.exception()
    if isinstance(error, argparse.ArgumentError) and error.__context__ is not None:
        cause = error.__context__.__cause__
        if isinstance(cause, InputError):
            return cause.key
    missing = message.startswith("the following arguments are required")
    return "command.missing_option" if missing else "command.bad_option"


class _Help(argparse.RawDescriptionHelpFormatter):
    """Says the default of every option that has one and does not say it itself."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        says_none = default in (None, [], argparse.SUPPRESS) or default is False
        if "default" in text or says_none or not action.option_strings:
            return text
        return f"{text} (default: %(default)s)".strip()


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose a model."""
    parser.add_argument(
        "--preset", metavar="NAME", help="a named model: tiny, llama3-8b"
    )
    parser.add_argument(
        "--model",
        metavar="SIZES",
        help="layers=4,hidden=256,heads=8,... (with --preset: what differs from it), "
        "or the path of a Hugging Face config.json",
    )
    parser.add_argument(
        "--model-from",
        metavar="MODULE:FUNCTION",
        default=MODEL_FROM,
        help="what builds the model, called with preset= and the sizes "
        "(default: %(default)s)",
    )


def add_layout_arguments(
    parser: argparse.ArgumentParser,
    *,
    seq: int | None = 128,
    seq_default: str = "%(default)s",
) -> None:
    """Adds the options that choose a layout and a batch.

    Args:
        parser: What they are added to.
        seq: Tokens of a sequence where none are given.
        seq_default: The same in words.
    """
    parser.add_argument(
        "--layout",
        metavar="LINE",
        required=True,
        help="such as data=2,fsdp=2,tensor=2 (required)",
    )
    add_counts(
        parser,
        {
            "--devices": "devices of the machine (default: as many as the layout "
            "takes)",
            "--global-batch": "sequences in a step (default: as few as the layout "
            "takes)",
        },
    )
    parser.add_argument(
        "--seq",
        type=positive,
        default=seq,
        metavar="N",
        help=f"tokens of a sequence (default: {seq_default})",
    )


def add_counts(parser: argparse.ArgumentParser, counts: Mapping[str, str]) -> None:
    """Adds options that are whole numbers of at least 1, or left out.

    Args:
        parser: What they are added to.
        counts: Each option, and its help.
    """
    for option, meaning in counts.items():
        parser.add_argument(option, type=positive, metavar="N", help=meaning)


def add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the word that names a checkpoint."""
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="the folder of a run (--out), of its checkpoints, or of one of them",
    )


def given_options(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Those of the options that have a value, as they are written.

    Example:
        >>> args = argparse.Namespace(checkpoint_s=30.0, mtbf=None, price=None)
        >>> given_options(args, ("checkpoint_s", "mtbf", "price"))
        ['--checkpoint-s']
    """
    given = (name for name in names if getattr(args, name) is not None)
    return [f"--{name.replace('_', '-')}" for name in given]


def option_words(options: Mapping[str, str | None]) -> list[str]:
    """The words of a command line that give those options that have a value."""
    given = [(option, value) for option, value in options.items() if value]
    return [word for pair in given for word in pair]


def positive(text: str) -> int:
    """The whole number of an option that must be at least 1, as argparse's `type`.

    Raises:
        argparse.ArgumentTypeError: It is no whole number, below 1, or beyond any run.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= _MOST:
        problem = InputError(
            f"{_shown(text)} must be a whole number of at least 1 and at most {_MOST}",
            key="value.not_whole_number",
        )
        raise argparse.ArgumentTypeError(str(problem)) from problem
    return number


def _shown(text: str) -> str:
    """What was given, short enough for a line."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def not_negative(text: str) -> int:
    """The whole number of an option that may be 0, as argparse's `type`.

    Raises:
        argparse.ArgumentTypeError: It is no whole number, below 0, or beyond any run.
    """
    return 0 if text == "0" else positive(text)


def above_zero(text: str) -> float:
    """The number of an option that must be above 0, as argparse's `type`.

    Raises:
        argparse.ArgumentTypeError: It is no number, infinite, or not above 0.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        problem = InputError(
            f"{text!r} must be above 0, and finite", key="value.not_positive"
        )
        raise argparse.ArgumentTypeError(str(problem)) from problem
    return number


def one_line(error: Exception | str) -> str:
    """An error's words in one line, without what a terminal would act on."""
    lines = (line.strip() for line in str(error).splitlines())
    return printable("; ".join(filter(None, lines)))


def print_error(error: Exception, *, as_json: bool) -> None:
    """Print the error of a command as one JSON object on stdout, if asked for.

    Args:
        error: What is wrong; its line is on stderr already.
        as_json: Whether there is a `--json`.
    """
    if as_json:
        key, message = FAULT_KEY, fault_line(error)
        if isinstance(error, InputError):
            key, message = error.key, one_line(error)
        elif isinstance(error, OSError):
            key, message = "command.unreadable_file", one_line(error)
        print(json.dumps({"error": {"key": key, "message": message}}))


def asks_json(words: Sequence[str]) -> bool:
    """Return whether a command line that cannot be parsed has `--json`.

    Example:
        >>> asks_json(["lint", "--js"]), asks_json(["lint", "--", "x"])
        (True, False)
    """
    return any(len(word) > 2 and "--json".startswith(word) for word in words)


def layout_of(args: argparse.Namespace) -> Layout:
    """The layout of the options.

    Raises:
        InputError: It cannot be read, does not fit `--devices`, or has a -1 without it.
    """
    layout = Layout.parse(args.layout)
    if args.devices is not None:
        return layout.resolve(args.devices)
    check_sizes(layout)
    return layout


def check_sizes(layout: Layout) -> None:
    """Refuses a layout whose sizes depend on the devices, where nobody says how many.

    Raises:
        InputError: A size is -1.
    """
    for axis in MESH_AXES:
        if getattr(layout, axis) == -1:
            raise InputError(
                f"mesh axis {axis!r} is -1, so its size depends on the devices; give "
                "--devices N, or give the axis a size",
                key="layout.open_size",
            )


def model_of(args: argparse.Namespace) -> Model:
    """The model of the options.

    Raises:
        InputError: There is no such builder, preset or size, or it builds no model.
    """
    from meshpar.model.contract import Model

    build = import_function(args.model_from, "--model-from")
    chosen: dict[str, Any] = {}
    if args.preset:
        chosen["preset"] = args.preset
    if args.model and Path(args.model).suffix == ".json":
        chosen["config_json"] = args.model
    elif args.model:
        chosen.update(parse_sizes(args.model))
    if not chosen and args.model_from == MODEL_FROM:
        raise InputError(
            "no model is chosen; give --preset NAME or --model SIZES",
            key="command.no_model",
        )
    try:
        model = build(**chosen)
    except InputError:
        raise
    except (TypeError, ValueError) as error:  # A user's own function raises its own.
        raise InputError(
            f"--model-from {args.model_from!r} cannot be called with "
            f"{', '.join(chosen) or 'nothing'}: {_first_line(error)}; give the sizes "
            "it takes, or name another function",
            key="command.bad_model_function",
        ) from error
    if not isinstance(model, Model):
        raise InputError(
            f"--model-from {args.model_from!r} gives a {type(model).__name__}, not a "
            "meshpar.Model; name a function that returns one",
            key="command.no_model_returned",
        )
    return model


def longest_seq(preset: str | None, model: str | None, *, most: int) -> int:
    """Tokens that a model of the options takes at a time, as far as they say it.

    Args:
        preset: The option.
        model: The option.
        most: What stands where the model takes more, or nobody says.

    Example:
        >>> longest_seq("tiny-gpt2", None, most=1024), longest_seq(None, None, most=64)
        (256, 64)
    """
    from meshpar.planner.workload.shapes import SHAPES, workload_of

    if model and Path(model).suffix == ".json":
        return min(most, workload_of(model).seq)
    sizes = parse_sizes(model) if model else {}
    known = SHAPES[preset].seq if preset in SHAPES else most
    own = sizes.get("seq", sizes.get("max_seq", known))
    return min(most, own) if isinstance(own, int) and own > 0 else most


def parse_sizes(text: str) -> dict[str, int | float | bool | str]:
    """`layers=4,tied=true` as a dict.

    Raises:
        InputError: A part is not key=value, a key is given twice, or it is no size.
    """
    values = key_values(text, noun="--model", example="layers=4,hidden=256")
    for key in values:
        if key in _NO_SIZES:
            raise InputError(
                f"--model {text!r}: {key!r} is no size; give {_NO_SIZES[key]}",
                key="command.not_a_size",
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
            f"{option} {name!r}: write module:function, such as {MODEL_FROM}",
            key="command.not_module_function",
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"{option} {name!r}: {_first_line(error)}; run from the checkout that "
            "holds it, or name a function of an installed module",
            key="command.function_not_found",
        ) from error
    if not callable(found):
        raise InputError(
            f"{option} {name!r} is a {type(found).__name__}, not a function; name one",
            key="command.not_a_function",
        )
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
