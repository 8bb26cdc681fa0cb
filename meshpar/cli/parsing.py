"""Words of a command line as values; bad ones refused in one line.

The command line is argparse's. tyro, which reads the options of `meshpar train` from a
dataclass, takes 0.18 s to import (1.0, 2026-11-26): as long as all of `meshpar lint
--help`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from meshpar.errors import (
    FAULT_KEY,
    InputError,
    fault_line,
    install_extra,
    key_values,
    printable,
)

MODEL_FROM = "meshpar.models.presets:build"
"""Function that builds a model unless `--model-from` names another."""

PAGES = {".html": "plotly"}
"""Suffix of a page -> the package that draws it."""

PICTURES = {".png": "matplotlib", ".svg": "matplotlib"}
"""Suffix of a picture -> the package that draws it."""

_OTHER_OPTIONS = {
    "preset": "--preset NAME",
    "config_json": "--model PATH, of a file that ends in .json",
}
"""Arguments of a builder that have an option of their own, and which."""

_MOST = 10**12
"""Limit of any count: bytes of an array are the largest."""

_SHOWN = 40
"""Characters of a wrong value that its error quotes."""


class OptionsError(SystemExit):
    """End of a command whose options argparse refuses, after the line is printed.

    Attributes:
        error: The refusal.
    """

    def __init__(self, error: InputError) -> None:
        super().__init__(2)
        self.error = error


class OneLineParser(argparse.ArgumentParser):
    """Parser that ends on bad input with one line on stderr and status 2."""

    def __init__(self, **options: Any) -> None:
        self._options: list[str] = []
        super().__init__(**{"formatter_class": _Help, **options})

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an option, and remember its names for misspelt ones."""
        self._options += names
        return super().add_argument(*names, **options)

    def error(self, message: str, key: str | None = None) -> NoReturn:
        """Print the line and exit.

        Args:
            message: Words of the refusal.
            key: Its key; by default that of the option's own error.
        """
        print(
            f"{self.prog}: {one_line(message)}; see {self.prog} --help", file=sys.stderr
        )
        raise OptionsError(InputError(message, key=key or _error_key(message)))

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Exit on words that are no options, naming the nearest ones."""
        options = [word.partition("=")[0] for word in words if word.startswith("-")]
        close = [
            near
            for word in options
            for near in difflib.get_close_matches(word, self._options, n=1, cutoff=0.6)
        ]
        hint = f" (did you mean {', '.join(close)}?)" if close else ""
        told = f"unrecognized arguments: {' '.join(words)}{hint}"
        self.error(told, "command.unknown_option")


def _error_key(message: str) -> str:
    """Return the key of the option's own error, or of argparse's refusal."""
    error = sys.exception()
    if isinstance(error, argparse.ArgumentError) and error.__context__ is not None:
        cause = error.__context__.__cause__
        if isinstance(cause, InputError):
            return cause.key
    missing = message.startswith("the following arguments are required")
    return "command.missing_option" if missing else "command.bad_option"


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help with the default of every option whose text does not give it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        says_none = default in (None, [], argparse.SUPPRESS) or default is False
        if "default" in text or says_none or not action.option_strings:
            return text
        return f"{text} (default: %(default)s)".strip()


def given_options(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return the options that have a value, as they are written.

    Example:
        >>> args = argparse.Namespace(checkpoint_s=30.0, mtbf=None, price=None)
        >>> given_options(args, ("checkpoint_s", "mtbf", "price"))
        ['--checkpoint-s']
    """
    given = (name for name in names if getattr(args, name, None) is not None)
    return [f"--{name.replace('_', '-')}" for name in given]


def option_words(options: Mapping[str, str | None]) -> list[str]:
    """Return the words of a command line that give the options that have a value."""
    given = [(option, value) for option, value in options.items() if value]
    return [word for pair in given for word in pair]


def positive(text: str) -> int:
    """Return the whole number of an option, at least 1; an argparse `type`.

    Raises:
        argparse.ArgumentTypeError: It is no whole number, below 1, or beyond any run.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= _MOST:
        shown = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
        problem = InputError(
            f"{shown} must be a whole number of at least 1 and at most {_MOST}",
            key="value.not_whole_number",
        )
        raise argparse.ArgumentTypeError(str(problem)) from problem
    return number


def not_negative(text: str) -> int:
    """Return the whole number of an option, at least 0; an argparse `type`.

    Raises:
        argparse.ArgumentTypeError: It is no whole number, below 0, or beyond any run.
    """
    return 0 if text == "0" else positive(text)


def above_zero(text: str) -> float:
    """Return the number of an option, above 0; an argparse `type`.

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
    """Return an error's words in one line, without control characters."""
    lines = (line.strip() for line in str(error).splitlines())
    return printable("; ".join(filter(None, lines)))


def print_error(error: Exception, *, as_json: bool) -> None:
    """Print the error of a command as one JSON object on stdout, if asked for.

    Args:
        error: The error, whose line is on stderr already.
        as_json: True if the command has `--json`.
    """
    if as_json:
        key, message = FAULT_KEY, fault_line(error)
        if isinstance(error, InputError):
            key, message = error.key, one_line(error)
        elif isinstance(error, OSError):
            key, message = "command.unreadable_file", one_line(error)
        print(json.dumps({"error": {"key": key, "message": message}}))


def asks_json(words: Sequence[str]) -> bool:
    """Return True if a command line that cannot be parsed has `--json`.

    Example:
        >>> asks_json(["lint", "--js"]), asks_json(["lint", "--", "x"])
        (True, False)
    """
    return any(len(word) > 2 and "--json".startswith(word) for word in words)


def parse_sizes(text: str) -> dict[str, int | float | bool | str]:
    """Return `layers=4,tied=true` as a dict.

    Raises:
        InputError: A part is not key=value, a key is given twice, or it is no size.
    """
    values = key_values(text, noun="--model", example="layers=4,hidden=256")
    for key in values:
        if key in _OTHER_OPTIONS:
            raise InputError(
                f"--model {text!r}: {key!r} is no size; give {_OTHER_OPTIONS[key]}",
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
    """Return the function that an option names as `module:function`.

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
        target = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"{option} {name!r}: {first_line(error)}; run in the folder that holds "
            "the module, or name one that is installed",
            key="command.function_not_found",
        ) from error
    if not callable(target):
        raise InputError(
            f"{option} {name!r} is a {type(target).__name__}, not a function; name one",
            key="command.not_a_function",
        )
    return target


def first_line(error: Exception) -> str:
    """Return the first line of an error's words, or its type's name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def output_file(text: str) -> str:
    """Return the path of a file to write, checked before the work; an argparse `type`.

    Raises:
        argparse.ArgumentTypeError: It is a folder, its folder does not exist, or the
            file cannot be written.
    """
    if problem := file_problem(text):
        raise argparse.ArgumentTypeError(str(problem)) from problem
    return text


def file_problem(text: str) -> InputError | None:
    """Return the error if no file can be written there, else None."""
    path = Path(text)
    if path.is_dir():
        return InputError(
            f"{text!r} is a folder; name a file in it", key="command.file_is_folder"
        )
    if not path.parent.is_dir():
        return InputError(
            f"{text!r}: there is no folder {str(path.parent)!r}; make it, or name "
            "another",
            key="command.no_folder",
        )
    existed = path.exists()
    try:
        with path.open("ab"):  # A disk may refuse what permissions allow.
            pass
    except OSError as error:
        return InputError(
            f"{text!r} cannot be written ({error.strerror}); name another file",
            key="command.unwritable_file",
        )
    if not existed:
        path.unlink()
    return None


def check_picture(option: str, path: str, drawn_by: Mapping[str, str]) -> None:
    """Check that a picture can be written to a path.

    Args:
        option: Option that names the path.
        path: The path.
        drawn_by: Suffix -> the package that draws it.

    Raises:
        InputError: The suffix is another, the file cannot be written, or the package
            is not installed.
    """
    library = drawn_by.get(Path(path).suffix)
    if library is None:
        raise InputError(
            f"{option} {path!r}: no picture of that kind; end it in "
            f"{' or '.join(drawn_by)}",
            key="command.unknown_suffix",
        )
    if problem := file_problem(path):
        raise InputError(f"{option} {problem}", key=problem.key)
    if find_spec(library) is None:
        raise InputError(
            f"{option} {path!r} is drawn by {library}, which is not installed: "
            f"{install_extra('plots')}",
            key="command.missing_package",
        )
