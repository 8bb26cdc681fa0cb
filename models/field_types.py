"""Configs refuse wrong types and ranges when they are built, not deep in a trace."""

from __future__ import annotations

import math
import reprlib
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any

from meshpar import InputError

_KINDS = {
    "int": (Integral, "a whole number", "value.not_whole_number"),
    "float": (Real, "a number", "value.not_number"),
    "bool": (bool, "true or false", "value.not_boolean"),
}


_ABOVE_ZERO = {"rope_theta", "local_rope_theta", "rope_factor", "factor"}
_MOST = 1 << 31
"""Limit of every count of a model: two larger ones overflow a 64-bit product."""

_AT_LEAST_ZERO = {"norm_epsilon", "init_std"}


def check_field_types(config: Any) -> None:
    """Check the types of a dataclass's int, float and bool fields.

    Raises:
        InputError: A field does not, a number is not finite, or one has a value that
            its name cannot have; a bool is no number here.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type in _KINDS:
            _check(field.name, value, *_KINDS[field.type])
        if field.type == "float":
            _check_range(field.name, value)
        if (
            field.name == "rope_scaling"
            and value is not None
            and not is_dataclass(value)
        ):
            raise InputError(
                f"rope_scaling={value!r}: must be a RopeScaling or None; on a command "
                "line name a config.json that has it",
                key="model.rope_scaling_wrong_type",
            )


def check_sizes(config: Any, *names: str) -> None:
    """Check that those fields of a dataclass are at least 1.

    Raises:
        InputError: One is not.
    """
    for name in names:
        if getattr(config, name) < 1:
            raise InputError(
                f"{name}={getattr(config, name)}: must be at least 1",
                key="value.below_one",
            )


def check_least_zero(config: Any, **meaning_of_zero: str) -> None:
    """Check that those fields of a dataclass are at least 0, which they allow.

    Args:
        config: The dataclass.
        meaning_of_zero: Field -> what a 0 stands for.

    Raises:
        InputError: One is below.
    """
    for name, meaning in meaning_of_zero.items():
        value = getattr(config, name)
        if value < 0:
            raise InputError(
                f"{name}={value}: must be at least 0; 0 is {meaning}",
                key="value.negative",
            )


def check_dropout(dropout: float) -> None:
    """Check that a dropout rate is at least 0 and below 1.

    Raises:
        InputError: It is not from 0 to below 1.
    """
    if not 0 <= dropout < 1:
        raise InputError(
            f"dropout={dropout}: must be at least 0 and below 1",
            key="model.dropout_out_of_range",
        )


def check_heads(embed: int, heads: int, head_dim: int | None = None) -> None:
    """Check that the heads divide the width, or have a size.

    Args:
        embed: Width of the residual stream.
        heads: Attention heads.
        head_dim: Size of a head, `embed / heads` when 0; None where it is always.

    Raises:
        InputError: They do not divide `embed`.
    """
    if not head_dim and embed % heads:
        way_out = "" if head_dim is None else "; set head_dim"
        raise InputError(
            f"embed={embed} is not a multiple of heads={heads}{way_out}",
            key="model.heads_indivisible",
        )


def check_rotated(size: int, name: str = "head_dim") -> None:
    """Check that a head has an even number of rotary dims.

    Raises:
        InputError: Their number is odd.
    """
    if size % 2:
        raise InputError(
            f"{name}={size}: rotary positions turn the dims of a head in pairs; give "
            f"an even one, such as {size + 1}",
            key="model.odd_rotary_size",
        )


def check_kv_heads(heads: int, kv_heads: int) -> None:
    """Check that the query heads are a multiple of the key and value heads.

    Raises:
        InputError: They do not.
    """
    if heads % kv_heads:
        raise InputError(
            f"heads={heads} is not a multiple of kv_heads={kv_heads}; every key/value "
            "head serves the same number of query heads",
            key="model.kv_heads_indivisible",
        )


def _check(name: str, value: Any, kind: type, words: str, key: str) -> None:
    is_bool = isinstance(value, bool)
    if not isinstance(value, kind) or is_bool != (kind is bool):
        raise InputError(f"{name}={reprlib.repr(value)}: must be {words}", key=key)
    if kind is Integral and not -_MOST <= value <= _MOST:
        raise InputError(
            f"{name}={reprlib.repr(value)}: must be at most {_MOST}",
            key="value.above_limit",
        )


def _check_range(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise InputError(
            f"{name}={value}: must be a finite number", key="value.not_finite"
        )
    if name in _ABOVE_ZERO and value <= 0:
        raise InputError(f"{name}={value}: must be above 0", key="value.not_positive")
    if name in _AT_LEAST_ZERO and value < 0:
        raise InputError(f"{name}={value}: must be at least 0", key="value.negative")
