"""Configs refuse wrong types and ranges when they are built, not deep in a trace."""

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


def check_sizes(config: Any, *names: str) -> None:
    """Whether those fields of a dataclass are at least 1.

    Raises:
        InputError: One is not.
    """
    for name in names:
        if getattr(config, name) < 1:
            raise InputError(f"{name}={getattr(config, name)}: must be at least 1")


def check_least_zero(config: Any, **meaning_of_zero: str) -> None:
    """Whether those fields of a dataclass are at least 0, which means something.

    Args:
        config: The dataclass.
        meaning_of_zero: Field -> what a 0 stands for.

    Raises:
        InputError: One is below.
    """
    for name, meaning in meaning_of_zero.items():
        value = getattr(config, name)
        if value < 0:
            raise InputError(f"{name}={value}: must be at least 0; 0 is {meaning}")


def check_dropout(dropout: float) -> None:
    """Whether that share of values can be dropped.

    Raises:
        InputError: It is not from 0 to below 1.
    """
    if not 0 <= dropout < 1:
        raise InputError(f"dropout={dropout}: must be at least 0 and below 1")


def check_heads(embed: int, heads: int, head_dim: int | None = None) -> None:
    """Whether heads have a size.

    Args:
        embed: Width of the residual stream.
        heads: Attention heads.
        head_dim: Size of a head, `embed / heads` when 0; None where it is always.

    Raises:
        InputError: They do not divide `embed`.
    """
    if not head_dim and embed % heads:
        way_out = "" if head_dim is None else "; set head_dim"
        raise InputError(f"embed={embed} is not a multiple of heads={heads}{way_out}")


def check_kv_heads(heads: int, kv_heads: int) -> None:
    """Whether key and value heads serve as many query heads each.

    Raises:
        InputError: They do not.
    """
    if heads % kv_heads:
        raise InputError(
            f"heads={heads} is not a multiple of kv_heads={kv_heads}; every key/value "
            "head serves the same number of query heads"
        )


def _check(name: str, value: object, kind: type, words: str) -> None:
    is_bool = isinstance(value, bool)
    if not isinstance(value, kind) or is_bool != (kind is bool):
        raise InputError(f"{name}={value!r}: must be {words}")
