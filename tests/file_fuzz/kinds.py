"""All kinds of files; those that need much are imported when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from tests.file_fuzz.kind import Kind

_MODULES = ("models", "runs", "texts")


def kinds() -> Mapping[str, Kind]:
    """Return the kinds of files by name."""
    found: dict[str, Kind] = {}
    for module in _MODULES:
        found |= importlib.import_module(f"tests.file_fuzz.{module}").KINDS
    return found


def kind_of(name: str) -> Kind:
    """Return a kind by name, `wrong` among them.

    Raises:
        KeyError: There is none.
    """
    from tests.file_fuzz.wrong import KINDS

    return KINDS[name] if name in KINDS else kinds()[name]
