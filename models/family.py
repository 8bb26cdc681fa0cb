"""A family of models: its config, what builds one, and its named shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshpar import Model


@dataclass(frozen=True, kw_only=True)
class Family:
    """What `presets.build` knows of one family.

    Args:
        config: The dataclass of its sizes.
        build: Config -> model.
        presets: Name -> config.
        of_text: Whether its models learn from a text alone.
        fuzzed: Small ones that `meshpar fuzz` draws, in the words of its options: sizes
            that exercise the family's branches, and rules of its own.
    """

    config: type
    build: Callable[[Any], Model]
    presets: Mapping[str, Any] = field(default_factory=dict)
    of_text: bool = False
    fuzzed: tuple[str, ...] = ()
