"""Which table and which `config.json` a config of ours has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshpar import InputError
from meshpar.models.convert.row import Row
from meshpar.models.convert.tables import deepseek, gemma3, gpt2, llama, moe, t5, vit
from meshpar.models.encoder_decoder import EncoderDecoderConfig
from meshpar.models.gemma3 import Gemma3Config
from meshpar.models.gpt2 import GPT2Config
from meshpar.models.llama import LlamaConfig
from meshpar.models.moe import MoEConfig
from meshpar.models.vit import ViTConfig

RUN_ONLY = ("router.tokens",)
"""Ends of the paths of state that a run counts with, and that no file of weights
holds."""


@dataclass(frozen=True)
class Convertible:
    """A family that can be read and written.

    Args:
        table: Config -> rows.
        to_json: Config -> what its `config.json` says.
        prefix: Of their names, which some files leave out.
        skipped: Config -> what begins the names of tensors that ours has not; none
            where that is empty.
    """

    table: Callable[[Any], Sequence[Row]]
    to_json: Callable[[Any], dict[str, Any]]
    prefix: str = ""
    skipped: Callable[[Any], str] = lambda config: ""


_FAMILIES: dict[type, Convertible] = {
    LlamaConfig: Convertible(llama.table, llama.to_json),
    GPT2Config: Convertible(gpt2.table, gpt2.to_json, prefix=gpt2.PREFIX),
    MoEConfig: Convertible(moe.table, moe.to_json, skipped=deepseek.skipped),
    Gemma3Config: Convertible(gemma3.table, gemma3.to_json),
    EncoderDecoderConfig: Convertible(t5.table, t5.to_json),
    ViTConfig: Convertible(vit.table, vit.to_json),
}


def conversion_table(config: Any) -> Sequence[Row]:
    """The rows of a model.

    Raises:
        InputError: There is no table for such a config.
    """
    return find_family(config).table(config)


def to_config_json(config: Any) -> dict[str, Any]:
    """Return the `config.json` of a model.

    Raises:
        InputError: No model of theirs is like it.
    """
    return find_family(config).to_json(config)


def find_family(config: Any) -> Convertible:
    """How a config's family is read and written.

    Raises:
        InputError: It is not.
    """
    if type(config) not in _FAMILIES:
        known = ", ".join(kind.__name__ for kind in _FAMILIES)
        raise InputError(
            f"no table of weights for a {type(config).__name__}; there are some for "
            f"{known}",
            key="weights.unknown_family",
        )
    return _FAMILIES[type(config)]
