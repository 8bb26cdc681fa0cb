"""A family of models: its config, what builds one, and its named shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from meshpar import Model
from meshpar.planner.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models, for `presets.build`.

    Args:
        config: The dataclass of its sizes.
        build: Config -> model.
        presets: Name -> config.
        sizes: Config -> sizes of its `Workload`, which the planner reads from
            `meshpar/planner/presets.json`; None where only a trace tells them.
        of_text: Whether its models learn from a text alone.
        fuzzed: Small ones that `meshpar fuzz` draws, in the words of its options: sizes
            that exercise the family's branches, and rules of its own.
    """

    config: type
    build: Callable[[Any], Model]
    presets: Mapping[str, Any] = field(default_factory=dict)
    sizes: Callable[[Any], dict[str, Any]] | None = None
    of_text: bool = False
    fuzzed: tuple[str, ...] = ()


_WORDS = {"hidden": "embed", "seq": "max_seq"}
"""Fields of `Workload` that configs call otherwise."""


def config_sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a workload's sizes under the names of a config's fields."""
    return {_WORDS.get(name, name): size for name, size in sizes.items()}


def workload_sizes(config: Any, **fixed: Any) -> dict[str, Any]:
    """Return the sizes of a language model's config as fields of `Workload`.

    Args:
        config: The config; what equals the default of `Workload` is left out.
        fixed: Fields that every model of the family has.
    """
    sizes = dict(fixed)
    for one in fields(Workload):
        size = getattr(config, _WORDS.get(one.name, one.name), one.default)
        size = bool(size) if isinstance(one.default, bool) else size
        unlimited = one.name == "seq" and not size
        if size != one.default and not unlimited:
            sizes[one.name] = size
    return sizes
