"""Give every option values that it was not made for: python -m tests.option_fuzz.

    python -m tests.option_fuzz FOLDER
    python -m tests.option_fuzz FOLDER --command plan --option=--seq --value huge

The commands run in this process. They parse, read files, check and calculate. Where
they would compile, train or start a process they are stopped
(`commands.kept_from_work`), and the value counts as taken. An option that names what to
write is given names outside of the folder too: the guard keeps it from that.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Before JAX is imported.

from meshpar.errors import InputError
from meshpar.machine.emulate import emulate
from tests.file_fuzz.cases import Outcome, limit_memory, note, run_case
from tests.file_fuzz.guard import Guard
from tests.option_fuzz.commands import (
    WITHOUT_WORDS,
    WORDS,
    ReachedError,
    kept_from_work,
    main_of,
    write_inputs,
)
from tests.option_fuzz.values import VALUES, Option, options

_DEEP = ("a", "b", "c", "work")
"""Folders within one another, so that `../../x` is within the outermost."""

_STOPPED = ("\x1b", "\r", "\u202e")


def main(argv: Sequence[str] | None = None) -> int:
    """Try all values; 0 where none is a fault. The last line counts the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="an empty folder, for the files")
    for name in ("command", "option", "value"):
        parser.add_argument(f"--{name}", help=f"only this {name}")
    parser.add_argument("--show", action="store_true", help="print all outcomes")
    args = parser.parse_args(argv)
    sys.dont_write_bytecode = True
    folder = args.folder.resolve()
    work = folder.joinpath(*_DEEP)
    _live_in(folder)
    emulate(8)
    write_inputs(work)
    guard = Guard(reads=False)
    limit_memory()
    counts: dict[str, Counter[str]] = {}
    with kept_from_work():
        _check_commands(guard, folder, work)
        for option, name in _chosen(args):
            what = f"--command {option.command} --option={option.name} --value '{name}'"
            note(folder, what)
            outcome = _run(guard, folder, work, option, VALUES[name])
            of_command = counts.setdefault(
                option.command, Counter(taken=0, refused=0, fault=0)
            )
            of_command[outcome.kind] += 1
            if outcome.kind == "fault" or args.show:
                print(f"{outcome.kind} {what}\n{outcome.told[-6000:]}\n", flush=True)
    print(json.dumps(counts), flush=True)
    return int(any(one["fault"] for one in counts.values()))


def _live_in(folder: Path) -> None:
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(folder / name)


def _check_commands(guard: Guard, folder: Path, work: Path) -> None:
    """Check that each command would begin its work with the words that are given."""
    for command, words in WORDS.items():
        outcome = _outcome(guard, folder, work, command, words)
        if outcome.kind != "taken":
            raise AssertionError(f"{command} {words}: {outcome}")


def _chosen(args: argparse.Namespace) -> Iterator[tuple[Option, str]]:
    for option in options():
        for name in VALUES:
            asked = (args.command, args.option, args.value)
            here = (option.command, option.name, name)
            if all(one in (None, two) for one, two in zip(asked, here, strict=True)):
                yield option, name


def _run(guard: Guard, folder: Path, work: Path, option: Option, value: str) -> Outcome:
    words = WORDS[option.command]
    if not option.name.startswith("--"):
        words = WITHOUT_WORDS[option.command]
    words = [*words, *option.words(value)]
    outcome = _outcome(guard, folder, work, option.command, words)
    given = os.path.realpath(work / value) if value else str(folder)
    if guard.paths and all(_is_of(given, path) for path in guard.paths):
        return Outcome("refused", "the guard kept it from writing where it was told")
    return outcome


def _outcome(
    guard: Guard, folder: Path, work: Path, command: str, words: Sequence[str]
) -> Outcome:
    def call() -> str:
        os.chdir(work)
        return _ended(command, words)

    return run_case(guard, folder, call)


def _is_of(given: str, path: str) -> bool:
    """Return whether a path is the given one, within it, or a folder above it."""
    return os.path.commonpath((given, path)) in (given, path)


def _ended(command: str, words: Sequence[str]) -> str:
    """Return what a command prints, once it has ended as it may.

    Raises:
        InputError: It refuses the value.
        AssertionError: It ends in another way, or its refusal is not one line.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    err.reconfigure(errors="backslashreplace")
    stdin, sys.stdin = sys.stdin, io.StringIO("")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main_of(command)(words)
    except SystemExit as end:
        status = int(end.code or 0)
    except ReachedError:
        return "begins its work"
    finally:
        sys.stdin = stdin
    err.seek(0)
    told = err.read()
    if status in (0, 1):
        return "done"
    *usage, line = told.splitlines() or [""]
    is_line = told.endswith("\n") and line.strip()
    is_line = is_line and all(one.startswith(("usage: ", " ")) for one in usage)
    if status != 2 or not is_line or any(one in told for one in _STOPPED):
        raise AssertionError(f"status {status}, and on stderr:\n{told[-5000:]}")
    raise InputError(line)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # Threads that a case has left behind are not waited for.
