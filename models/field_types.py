"""Configs refuse values of another type when they are built, not deep in a trace."""

from __future__ import annotations

from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from meshpar import InputError

_KINDS = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "true or false"),
}


def check_field_types(config: Any) -> None:
    """Whether every int, float and bool field of a dataclass holds one.

    Raises:
        InputError: A field does not; a bool is no number here.
    """
    for field in fields(config):
        if field.type in _KINDS:
            _check(field.name, getattr(config, field.name), *_KINDS[field.type])


def _check(name: str, value: object, kind: type, words: str) -> None:
    is_bool = isinstance(value, bool)
    if not isinstance(value, kind) or is_bool != (kind is bool):
        raise InputError(f"{name}={value!r}: must be {words}")
