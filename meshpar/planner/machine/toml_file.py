"""A TOML file that describes a device or an execution, field by field."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from meshpar.errors import InputError, nearest
from meshpar.foreign_files import read_toml


def toml_values(path: str | Path, *, room: str) -> dict[str, Any]:
    """Return the values of a file.

    Args:
        path: The file.
        room: Room of the key of an error: `hardware` or `plan`.

    Raises:
        InputError: It cannot be read.
    """
    return read_toml(path, key=f"{room}.unreadable_toml")


def check_fields(
    kind: type, given: Collection[str], where: str, start: str, *, room: str
) -> None:
    """Refuses names that do not make one of a dataclass.

    Args:
        kind: The dataclass.
        given: Names of the fields that have a value.
        where: Of what an error speaks: the file, and the part of it.
        start: What the file may start from, in words.
        room: Room of the key of an error: `hardware` or `plan`.

    Raises:
        InputError: A name is no field, or a field without a default has no value.
    """
    known = {field.name: field for field in fields(kind)}
    for name in given:
        if name not in known:
            raise InputError(
                f"{where} no field {name!r}; {nearest(name, known)}",
                key=f"{room}.unknown_field",
            )
    lacking = [
        name
        for name, field in known.items()
        if field.default is MISSING
        and field.default_factory is MISSING
        and name not in given
    ]
    if lacking:
        raise InputError(
            f"{where} give {', '.join(lacking)}, or start from a known {start}",
            key=f"{room}.missing_field",
        )
