"""The language model that a run trains."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from meshpar import InputError, Model
from meshpar.cli.parsing import parse_sizes
from meshpar.models.convert.weights import read_config
from meshpar.models.presets import (
    OTHER_PRESETS,
    PRESETS,
    TEXT_PRESETS,
    build_config,
    configure,
)
from meshpar.planner.workload.shapes import SHAPES
from meshpar.recipes.config import PRESET, RunConfig
from meshpar.recipes.tokenizer import default_vocab, vocab_needed


def build_model(config: RunConfig) -> Model:
    """The model of a run.

    Raises:
        InputError: There is none of that name or those sizes, or it is no language
            model with a token for every byte, or of its tokenizer.
    """
    chosen = model_config(config)
    model, vocab = build_config(chosen), chosen.vocab
    needed = vocab_needed(config)
    if vocab < needed:
        what = "bytes need" if config.tokenizer is None else f"{config.tokenizer} needs"
        raise InputError(
            f"{_name(config)} has a vocabulary of {vocab}, but {what} "
            f"{needed}; choose a larger preset, or add --model vocab={needed}",
            key="model.vocabulary_too_small",
        )
    return model


def model_sizes(config: RunConfig) -> dict[str, Any]:
    """Return the sizes of a run's model as plain values."""
    return dataclasses.asdict(model_config(config))


def model_config(config: RunConfig) -> Any:
    """The config of a run's model: that of the weights, unless another is given."""
    named = config.preset is not None or config.model is not None
    if config.from_weights is not None and not named:
        return read_config(config.from_weights)
    return configure(**_chosen(config))


def _chosen(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of `meshpar.models.presets.build`."""
    preset, model = config.preset, config.model
    if model is None:
        chosen = {"preset": _trainable(preset or PRESET)}
        return chosen if preset else _with_vocab(config, chosen)
    if Path(model).suffix == ".json":
        return {"preset": preset, "config_json": model}
    if "=" in model:
        chosen = {"preset": preset and _trainable(preset), **parse_sizes(model)}
        return chosen if preset else _with_vocab(config, chosen)
    if preset is not None:
        raise InputError(
            f"preset {preset!r} and model {model!r} are both given; give one, or "
            "--model sizes such as layers=2",
            key="model.preset_and_model",
        )
    return {"preset": _trainable(model)}


def _with_vocab(config: RunConfig, chosen: dict[str, Any]) -> dict[str, Any]:
    """With the tokenizer's vocabulary where no other is asked for."""
    vocab = default_vocab(config)
    return chosen if vocab is None else {"vocab": vocab, **chosen}


def _trainable(name: str) -> str:
    """A name of a preset, once it is one that trains on a text.

    Raises:
        InputError: It is of a model with other inputs, or only the planner knows it.
    """
    if name in OTHER_PRESETS and name not in TEXT_PRESETS:
        raise InputError(
            f"preset {name!r} is no model of a text alone; choose one of "
            f"{', '.join(TEXT_PRESETS)}",
            key="model.not_of_text",
        )
    if name in SHAPES and name not in PRESETS:
        raise InputError(
            f"preset {name!r} is a published run's, which meshpar plan knows and no "
            f"model here trains; choose one of {', '.join(PRESETS)}",
            key="model.only_for_planner",
        )
    return name


def _name(config: RunConfig) -> str:
    if config.model is None and config.preset is None and config.from_weights:
        return f"the model in {str(config.from_weights)!r}"
    if config.model is None:
        return f"preset {config.preset or PRESET!r}"
    return f"model {config.model!r}"
