"""Where a picture goes, checked before the work that it shows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from meshpar.errors import InputError

PAGES = {".html": "plotly"}
"""Suffix of a page -> what draws it."""

PICTURES = {".png": "matplotlib", ".svg": "matplotlib"}
"""Suffix of a picture -> what draws it."""


def check_picture(option: str, path: str, drawn_by: Mapping[str, str]) -> None:
    """Passes a path that a picture can be written to.

    Args:
        option: What names the path on the command line.
        path: The path.
        drawn_by: Suffix -> the library that is needed for it.

    Raises:
        InputError: Another suffix, no such folder, or the library is not installed.
    """
    library = drawn_by.get(Path(path).suffix)
    if library is None:
        raise InputError(
            f"{option} {path!r}: no picture of that kind; end it in "
            f"{' or '.join(drawn_by)}"
        )
    check_file(option, path)
    if find_spec(library) is None:
        raise InputError(
            f"{option} {path!r} is drawn by {library}, which is not installed: "
            "pip install 'meshpar[plots]'"
        )


def check_file(option: str, path: str) -> None:
    """Passes a path that a file can be written to.

    Raises:
        InputError: Its folder is none, or it is a folder itself.
    """
    folder = Path(path).parent
    if not folder.is_dir():
        raise InputError(
            f"{option} {path!r}: no folder {str(folder)!r}; make it first, or name "
            "another"
        )
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise InputError(
            f"{option} {path!r} cannot be written: name a file in a folder of your own"
        )
