"""Parse the options of a run: the command line, then a file, then the defaults."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import tyro

from meshpar.errors import InputError, nearest
from meshpar.recipes.config import (
    ENVIRONMENT_VARIABLE,
    NUM_VIRTUAL_DEVICES,
    OPTIONS,
    SEVERAL,
    START_OPTIONS,
    RunConfig,
)
from meshpar.recipes.config_file import SAVED, read_options
from meshpar.recipes.optimizer_options import FIRST_DEFAULT
from meshpar.recipes.option_checks import DATA_OPTIONS

_DESCRIPTION = """\
Train a language model on text, under any layout.

example:
  {command} --layout data=4,tensor=2 --text mine.txt --out runs/mine

exit status: 0 done; 1 stopped by a bad step; 2 bad input; 130 or 143 saved and stopped
by Ctrl-C or SIGTERM; 75 ended because another process failed: start all processes again
with --resume auto"""


def _flags(names: Iterable[str]) -> set[str]:
    return {f"--{name.replace('_', '-')}" for name in names}


_T = TypeVar("_T")
_SEVERAL = _flags(SEVERAL)
_NOT_OF_A_FOLDER = _flags((*START_OPTIONS, "emulate"))
_WRITTEN = _flags(("log_json", "tensorboard", "data_cache"))


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """Options of a command line: those of a run, and a file of more.

    Args:
        run: Options of the run.
        config: TOML or YAML file of these options; the command line overrides it.
    """

    run: tyro.conf.OmitArgPrefixes[RunConfig]
    config: Path | None = None


def parse_arguments(
    argv: Sequence[str] | None = None, command: str = "pretrain"
) -> RunConfig:
    """Return the configuration that a command line asks for.

    A resumed run takes the options that neither the command line nor its `--config`
    gives from `config.toml` in the run's folder.

    Args:
        argv: Words of the command line; those of this process by default.
        command: Name of the command, for messages.

    Raises:
        InputError: An option or a value is unknown or invalid.

    Example:
        >>> parse_arguments(["--steps", "5"]).steps
        5
    """
    words = with_values(sys.argv[1:] if argv is None else argv)
    faults: dict[str, Path] = {}
    if config := _value(words, "--config"):
        words = [*_file_options(words, Path(config), command, faults), *words]
    resumed = _value(words, "--resume") not in (None, "False")
    saved = Path(_value(words, "--out") or "") / SAVED
    if resumed and _value(words, "--out") and saved.exists():
        words = [*_folder_options(words, saved, command, faults), *words]
    try:
        return _parse(words, command).run
    except InputError as error:
        if path := faults.get(str(error)):
            raise InputError(f"{str(path)!r}: {error}", key=error.key) from None
        raise


def _folder_options(
    words: list[str], saved: Path, command: str, faults: dict[str, Path]
) -> list[str]:
    """Return the saved options that a run's folder may set.

    The folder may be untrusted, so the command line alone sets which processes to join,
    `--emulate`, and paths outside the folder that are written to.

    Raises:
        InputError: The saved options write outside the folder, and the command line
            does not repeat them.
    """
    kept = _without(_file_options(words, saved, command, faults), _NOT_OF_A_FOLDER)
    if not any(_option(word) == "--optimizer" for word in kept):
        kept.insert(0, f"--optimizer={FIRST_DEFAULT}")  # Saved by version 0.2.
    given = {_option(word) for word in words}
    for option in sorted(_WRITTEN - given):
        path = _value(kept, option)
        if path and not Path(path).resolve().is_relative_to(saved.parent.resolve()):
            name = option.removeprefix("--").replace("-", "_")
            raise InputError(
                f"{str(saved)!r} has {name} = {path!r}, outside of the run's folder, "
                f"but a folder may not choose files elsewhere; give "
                f"{option} {shlex.quote(path)} again, or delete that line",
                key="run.folder_writes_outside",
            )
    return kept


def _value(words: Sequence[str], option: str) -> str | None:
    """Return the value of an option's last occurrence, or None."""
    value = None
    for word, following in zip(words, [*words, None][1:], strict=True):
        if _option(word) == option:
            value = word.partition("=")[2] if "=" in word else following
    return value


def _file_options(
    words: list[str], path: Path, command: str, faults: dict[str, Path]
) -> list[str]:
    """Return the options of a file that `words` do not override.

    A repeated option of `words` replaces all of the file's, `--text` replaces the
    options of data, and `--data` replaces `--text`. Errors of the file alone are kept
    in `faults`, as `words` may correct them.
    """
    options = read_options(path)
    try:
        _parse(options, command)
    except InputError as error:
        faults[str(error)] = path
    given = {_option(word) for word in words}
    replaced = given & _SEVERAL
    if "--data" in given:
        replaced |= {"--text"}
    elif "--text" in given:
        replaced |= _flags(DATA_OPTIONS)
    return _without(options, replaced)


def _without(words: Sequence[str], options: set[str]) -> list[str]:
    return [word for word in words if _option(word) not in options]


def _option(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def with_values(words: Sequence[str]) -> list[str]:
    """Return the words with the option names and values that users may leave out.

    `--resume` alone means `--resume True`, and each further value after `--data` (as a
    shell expands a pattern) becomes an option of its own.

    Example:
        >>> with_values(["--resume", "--steps", "5"])
        ['--resume', 'True', '--steps', '5']
        >>> with_values(["--data", "a.txt", "b.txt"])
        ['--data', 'a.txt', '--data', 'b.txt']
    """
    completed: list[str] = []
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word == "--no-resume":
            completed += ["--resume", "False"]
        else:
            if (
                completed[-2:-1]
                and completed[-2] in _SEVERAL
                and not word.startswith("-")
            ):
                completed.append(completed[-2])
            completed.append(word)
        if word == "--resume" and following not in ("auto", "True", "False"):
            completed.append("True")
    return completed


def _parse(words: Sequence[str], command: str) -> CommandLine:
    return parse_words(
        CommandLine,
        with_values(words),
        known=(*OPTIONS, "config"),
        prog=command,
        description=_DESCRIPTION.format(command=command),
        config=(tyro.conf.UseAppendAction,),
    )


def parse_words(
    kind: type[_T], words: Sequence[str], *, known: Sequence[str], **options: Any
) -> _T:
    """Parse a command line into an options dataclass.

    Args:
        kind: The dataclass.
        words: Words of the command line.
        known: Names of all options, to suggest one for a misspelt name.
        options: Further arguments of `tyro.cli`.

    Raises:
        InputError: An option or a value is unknown or invalid.
    """
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            given, unknown = tyro.cli(
                kind, args=words, return_unknown_args=True, **options
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise _reason(output.getvalue(), end) from None
    if unknown:
        raise _unknown(unknown[0], known)
    return given


def _reason(text: str, end: SystemExit) -> InputError:
    """Return tyro's error without the box that it draws around the text."""
    error = end.__context__
    while error is not None:
        if isinstance(error, InputError):
            return InputError(str(error), key=error.key)
        error = error.__cause__ or error.__context__
    title, *lines = [line.strip("│ ") for line in text.splitlines()] or ["bad options"]
    message: list[str] = []
    for line in lines:
        if set(line) <= set("─-╰╯"):  # A rule above or below the text.
            if message:
                break
            continue
        message.append(line)
    return InputError(" ".join(message).rstrip(".") or title, key="command.bad_option")


def _unknown(word: str, names: Sequence[str]) -> InputError:
    if not word.startswith("--"):
        return InputError(
            f"no option takes {word!r}; each value follows its --option",
            key="command.stray_value",
        )
    name = word.removeprefix("--").partition("=")[0].replace("-", "_")
    known = nearest(name, names).replace("_", "-")
    return InputError(
        f"no option {word.partition('=')[0]}; {known}", key="command.unknown_option"
    )


def resuming_command(config: RunConfig, program: Sequence[str]) -> str:
    """Return the shell command that resumes a run.

    Args:
        config: Options of the run.
        program: Words before the options.

    Example:
        >>> run = RunConfig(steps=9, text="my text.txt", out="runs/a", emulate=8)
        >>> resuming_command(run, ["meshpar", "train"])
        "meshpar train --steps 9 --text 'my text.txt' --out runs/a --resume"
    """
    options = replace(config, resume=False, stop_after=None, profile=0).changed()
    if ENVIRONMENT_VARIABLE in os.environ or config.emulate != NUM_VIRTUAL_DEVICES:
        options["emulate"] = config.emulate
    words = list(program)
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            text = str(one)
            words += [f"{option}={text}"] if text.startswith("-") else [option, text]
    return shlex.join([*words, "--resume"])


def program_words(argv: Sequence[str], default: Sequence[str]) -> list[str]:
    """Return the words that started this process, up to its options.

    Args:
        argv: The options. If this process was started with others, `default` is
            returned.
        default: Words for a call from Python.
    """
    words = list(sys.orig_argv)
    count = len(words) - len(argv)
    if words[count:] != list(argv) or count < 2:
        return list(default)
    words = words[:count]
    script = words[1]
    if Path(script).name != "meshpar":
        return words
    installed = shutil.which("meshpar")
    same = installed is not None and Path(installed).samefile(script)
    return ["meshpar" if same else script, *words[2:]]
