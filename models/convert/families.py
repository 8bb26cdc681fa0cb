"""Which table and which `config.json` a config of ours has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshpar import InputError
from meshpar.models.convert.row import Row
from meshpar.models.convert.tables import llama
from meshpar.models.llama import LlamaConfig


@dataclass(frozen=True)
class Convertible:
    """A family that can be read and written.

    Args:
        table: Config -> rows.
        to_json: Config -> what its `config.json` says.
    """

    table: Callable[[Any], Sequence[Row]]
    to_json: Callable[[Any], dict[str, Any]]


_FAMILIES: dict[type, Convertible] = {
    LlamaConfig: Convertible(llama.table, llama.to_json),
}


def table_of(config: Any) -> Sequence[Row]:
    """The rows of a model.

    Raises:
        InputError: There is no table for such a config.
    """
    return _of(config).table(config)


def json_of(config: Any) -> dict[str, Any]:
    """What the `config.json` of a model says.

    Raises:
        InputError: No model of theirs is like it.
    """
    return _of(config).to_json(config)


def _of(config: Any) -> Convertible:
    if type(config) not in _FAMILIES:
        known = ", ".join(kind.__name__ for kind in _FAMILIES)
        raise InputError(
            f"no table of weights for a {type(config).__name__}; there are some for "
            f"{known}"
        )
    return _FAMILIES[type(config)]
