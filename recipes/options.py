"""The options of a run, from the command line over a file over the defaults."""

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
    OF_ONE_START,
    OPTIONS,
    SEVERAL,
    RunConfig,
)
from meshpar.recipes.config_file import SAVED, read_options
from meshpar.recipes.option_checks import OF_DATA

_DESCRIPTION = """\
Trains a language model on a text, under any layout.

example:
  {command} --layout data=4,tensor=2 --text mine.txt --out runs/mine

exit status: 0 done, 1 stopped by a bad step, 2 bad input, 130 or 143 saved and stopped
by Ctrl-C or SIGTERM, 75 ended because another process had: start all again with
--resume auto"""


def _words_of(names: Iterable[str]) -> set[str]:
    return {f"--{name.replace('_', '-')}" for name in names}


_T = TypeVar("_T")
_SEVERAL = _words_of(SEVERAL)
_NOT_OF_A_FOLDER = _words_of((*OF_ONE_START, "emulate"))
_WRITTEN = _words_of(("log_json", "tensorboard", "data_cache"))


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What a command line says: the options of a run, or where to find them.

    Args:
        run: The run.
        config: A TOML or YAML file of these options; the command line wins over it.
    """

    run: tyro.conf.OmitArgPrefixes[RunConfig]
    config: Path | None = None


def parse_arguments(
    argv: Sequence[str] | None = None, command: str = "pretrain"
) -> RunConfig:
    """The run that a command line asks for.

    Where it resumes, what neither it nor its `--config` gives is as the run's folder
    has it.

    Args:
        argv: Its words; those of this process when absent.
        command: What comes before them, for messages.

    Raises:
        InputError: An option or a value is not to be had.

    Example:
        >>> parse_arguments(["--steps", "5"]).steps
        5
    """
    words = with_values(sys.argv[1:] if argv is None else argv)
    faults: dict[str, Path] = {}
    if config := _value(words, "--config"):
        words = [*_below(words, Path(config), command, faults), *words]
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
    kept = _without(_below(words, saved, command, faults), _NOT_OF_A_FOLDER)
    given = {_option(word) for word in words}
    for option in sorted(_WRITTEN - given):
        path = _value(kept, option)
        if path and not Path(path).resolve().is_relative_to(saved.parent.resolve()):
            name = option.removeprefix("--").replace("-", "_")
            raise InputError(
                f"{str(saved)!r} has {name} = {path!r}, outside of the run's folder, "
                f"and a folder does not decide what is written elsewhere; give "
                f"{option} {shlex.quote(path)} again, or delete that line",
                key="run.folder_writes_outside",
            )
    return kept


def _value(words: Sequence[str], option: str) -> str | None:
    """What an option has on a command line, the last time that it is given."""
    found = None
    for word, following in zip(words, [*words, None][1:], strict=True):
        if _option(word) == option:
            found = word.partition("=")[2] if "=" in word else following
    return found


def _below(
    words: list[str], path: Path, command: str, faults: dict[str, Path]
) -> list[str]:
    """The options of a file, without those that would add to what `words` give.

    Nor those of data where `words` give a text, and the other way round. What is wrong
    with the file alone is noted in `faults`: `words` may put it right.
    """
    found = read_options(path)
    try:
        _parse(found, command)
    except InputError as error:
        faults[str(error)] = path
    given = {_option(word) for word in words}
    replaced = given & _SEVERAL
    if "--data" in given:
        replaced |= {"--text"}
    elif "--text" in given:
        replaced |= _words_of(OF_DATA)
    return _without(found, replaced)


def _without(words: Sequence[str], options: set[str]) -> list[str]:
    return [word for word in words if _option(word) not in options]


def _option(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def with_values(words: Sequence[str]) -> list[str]:
    """The words, `--resume` with the value that it has where none is given.

    What a shell makes of a pattern after `--data` are several values of it.

    Example:
        >>> with_values(["--resume", "--steps", "5"])
        ['--resume', 'True', '--steps', '5']
        >>> with_values(["--data", "a.txt", "b.txt"])
        ['--data', 'a.txt', '--data', 'b.txt']
    """
    told: list[str] = []
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word == "--no-resume":
            told += ["--resume", "False"]
        else:
            if told[-2:-1] and told[-2] in _SEVERAL and not word.startswith("-"):
                told.append(told[-2])
            told.append(word)
        if word == "--resume" and following not in ("auto", "True", "False"):
            told.append("True")
    return told


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
    """Return the options of a command line as one of their dataclass.

    Args:
        kind: The dataclass.
        words: Of the command line.
        known: Names of all options, for what is misspelt.
        options: Of `tyro.cli`.

    Raises:
        InputError: An option or a value is not to be had.
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
    """Return the error that tyro tells, without the box that it draws around it."""
    error = end.__context__
    while error is not None:
        if isinstance(error, InputError):
            return InputError(str(error), key=error.key)
        error = error.__cause__ or error.__context__
    title, *lines = [line.strip("│ ") for line in text.splitlines()] or ["bad options"]
    told: list[str] = []
    for line in lines:
        if set(line) <= set("─-╰╯"):  # A rule: above the text, or below it.
            if told:
                break
            continue
        told.append(line)
    return InputError(" ".join(told).rstrip(".") or title, key="command.bad_option")


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
    """The command that goes on with a run, as a shell takes it.

    Args:
        config: The run's.
        program: The words before its options.

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
    """The words that started this process, up to its options.

    Args:
        argv: The options; `default` is the answer where the process has others.
        default: The words of a call from Python.
    """
    words = list(sys.orig_argv)
    count = len(words) - len(argv)
    if words[count:] != list(argv) or count < 2:
        return list(default)
    words = words[:count]
    script = words[1]
    if Path(script).name != "meshpar":
        return words
    found = shutil.which("meshpar")
    same = found is not None and Path(found).samefile(script)
    return ["meshpar" if same else script, *words[2:]]
