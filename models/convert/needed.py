"""Computations of a Hugging Face family that an exported model must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar import InputError


def check_needed(config: Any, needed: Mapping[str, Any], kind: str) -> None:
    """Passes a config whose fields have the values that all of their models have.

    Args:
        config: Of ours.
        needed: Field -> the value that theirs has.
        kind: What they call the family, their `model_type`.

    Raises:
        InputError: A field has another value.
    """
    for name, theirs in needed.items():
        if getattr(config, name) != theirs:
            raise InputError(
                f"{name}={getattr(config, name)!r}: {kind} has {theirs!r}; export a "
                "model that has it, too",
                key="weights.value_not_of_family",
            )
