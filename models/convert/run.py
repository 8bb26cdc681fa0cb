"""The model of a checkpoint, low-rank changes merged into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshpar import InputError, Model
from meshpar.data.sources import OF_TOKENS, DataSource
from meshpar.model.parameter import flat
from meshpar.models.convert.stored_config import config_from_sizes, read_lora
from meshpar.models.presets import build_config
from meshpar.train.checkpoint.choice import CheckpointError
from meshpar.train.checkpoint.contents import Contents, check_description, read_arrays


@dataclass(frozen=True, kw_only=True)
class OfCheckpoint:
    """A model and its values, none of them read yet.

    Args:
        contents: Of the checkpoint.
        config: Of the model.
        model: Of that config.
        params: Its parameters, layers first to last; of a run with LoRA each matrix
            with its product.
        model_state: The same of its state.
    """

    contents: Contents
    config: Any
    model: Model
    params: Any
    model_state: Any


def read_checkpoint(
    path: str | Path, step: int | None, *, instead: str, average: bool = False
) -> OfCheckpoint:
    """Read the parameters that a run has trained.

    Args:
        path: The folder of a run, of its checkpoints, or of one of them.
        step: Which; the newest when absent.
        instead: What one may do where it does not say what its model is.
        average: Read the run's average of the parameters in their place.

    Raises:
        CheckpointError: There is none, or its files are not as they were written.
        InputError: It does not say what its model is, or has no average.
    """
    contents, arrays = read_arrays(Path(path), step, average=average)
    where = f"checkpoint of step {contents.step} in {contents.directory!r}"
    check_description(contents.config, where)
    sizes = contents.config.get("model_sizes")
    if not sizes:
        raise InputError(
            f"the {where} does not say what its model is; {instead}",
            key="checkpoint.missing_model_sizes",
        )
    config = config_from_sizes(sizes)
    model = build_config(config)
    params, state = arrays.get("params", {}), arrays.get("model_state", {})
    said = contents.config.get("lora")
    lora = read_lora(said) if said else None
    _check_shapes(lora.model(model) if lora else model, params, state, where)
    if lora:
        params, state = lora.merged(model, params, state)
    return OfCheckpoint(
        contents=contents,
        config=config,
        model=model,
        params=params,
        model_state=state,
    )


def _check_shapes(model: Model, params: Any, state: Any, where: str) -> None:
    """Check that the arrays of a checkpoint are those of the model that it names.

    Raises:
        CheckpointError: One is missing, or has another shape.
    """
    for declared, stored in ((model.parameters, params), (model.state, state)):
        found = {name: tuple(one.shape) for name, one in flat(stored).items()}
        for name, one in flat(declared).items():
            wanted = tuple(one.stacked_shape)
            if found.get(name) != wanted:
                told = f"shape {found[name]}" if name in found else "no such array"
                raise CheckpointError(
                    f"{where} says that its model has {name} of shape {wanted}, and "
                    f"holds {told}: its file run/metadata is of another run, or was "
                    "changed",
                    key="checkpoint.other_model",
                )


def has_token_files(said: Mapping[str, Any]) -> bool:
    """Return True if a run's data are files of tokens; for old runs, judged by name.

    Args:
        said: What its checkpoint says of it.

    Example:
        >>> has_token_files({"formats": ["jsonl"]})
        False
        >>> has_token_files({"sources": ["a.bin"]})
        True
    """
    if "formats" in said:
        return bool(OF_TOKENS.intersection(said["formats"]))
    paths = [DataSource.parse(text).path for text in said.get("sources", ())]
    return any(path.endswith((".bin", ".idx")) for path in paths)
