"""Where a file goes, checked before the work whose outcome it holds."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from meshpar.errors import InputError

PAGES = {".html": "plotly"}
"""Suffix of a page -> what draws it."""

PICTURES = {".png": "matplotlib", ".svg": "matplotlib"}
"""Suffix of a picture -> what draws it."""


def output_file(text: str) -> str:
    """The path of a file to write, as argparse's `type`: told before the work.

    Raises:
        argparse.ArgumentTypeError: It is a folder, its folder is not there, or nothing
            can be written there.
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
    was_there = path.exists()
    try:
        with path.open("ab"):  # What permissions say is not what a disk allows.
            pass
    except OSError as error:
        return InputError(
            f"{text!r} cannot be written ({error.strerror}); name another file",
            key="command.unwritable_file",
        )
    if not was_there:
        path.unlink()
    return None


def check_picture(option: str, path: str, drawn_by: Mapping[str, str]) -> None:
    """Passes a path that a picture can be written to.

    Args:
        option: What names the path on the command line.
        path: The path.
        drawn_by: Suffix -> the library that is needed for it.

    Raises:
        InputError: Another suffix, no file can be written there, or the library is not
            installed.
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
            "pip install 'meshpar[plots]'",
            key="command.missing_package",
        )
