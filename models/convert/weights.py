"""Weights of others as ours, each device reading its part.

weights = read_weights("SmolLM2-135M")
step = make_train_step(weights.model, optimizer, layout)
state = step.init(params=weights.params, model_state=weights.model_state)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshpar import InputError, Model
from meshpar.errors import local_path
from meshpar.models.convert.assembled import assembled
from meshpar.models.convert.families import find_family
from meshpar.models.convert.gguf_file import GGUFFile
from meshpar.models.convert.hf_config import config_from_json
from meshpar.models.convert.safetensors_folder import SafetensorsFolder
from meshpar.models.convert.source import Source, Without, with_prefix
from meshpar.models.convert.tables.gguf import gguf_config, gguf_table
from meshpar.models.presets import build_config

CONFIG, GGUF = "config.json", ".gguf"
_HEADS = frozenset(("lm_head.weight", "output.weight"))
"""The names of a head's table, of safetensors and of GGUF."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model of others, nothing of it read yet.

    Args:
        config: Ours.
        model: Of that config.
        params: Tree of parameters, as `TrainStep.init` takes it.
        model_state: The same of what it has of the model's state.
        source: Its tensors; counts the bytes that are read.
    """

    config: Any
    model: Model
    params: dict[str, Any]
    model_state: dict[str, Any]
    source: Source


def open_source(path: str | Path) -> GGUFFile | SafetensorsFolder:
    """Open a `.gguf` file, or the safetensors of a folder.

    Opening a GGUF file parses its list of tokens; pass the result on where the same
    file is needed again.

    Raises:
        InputError: It cannot be read.
    """
    path = local_path("weights", path)
    return GGUFFile(path) if _is_gguf(path) else SafetensorsFolder(path)


def read_config(path: str | Path, source: Source | None = None) -> Any:
    """Our config of a model of theirs.

    Args:
        path: A folder with a `config.json`, or a `.gguf` file.
        source: The same, opened by `open_source`.

    Raises:
        InputError: There is none, or it is of a model that we have not.
    """
    path = local_path("weights", path)
    if _is_gguf(path):
        return gguf_config(source if isinstance(source, GGUFFile) else GGUFFile(path))
    if not (path / CONFIG).is_file():
        raise InputError(
            f"no {CONFIG} in {str(path)!r}; name a folder as transformers writes it, "
            "or a .gguf file",
            key="weights.no_config",
        )
    return config_from_json(path / CONFIG)


def read_weights(
    path: str | Path, config: Any = None, *, source: Source | None = None
) -> Weights:
    """The weights of a folder, to be read where they are needed.

    Args:
        path: A folder with a `config.json` and safetensors, or a `.gguf` file, whose
            quantized values are made numbers as they are read.
        config: Ours, where it is another than `read_config(path)`, such as one with
            dropout.
        source: The same, opened by `open_source`.

    Raises:
        InputError: Something is missing, or of another model than the config says.
    """
    source = open_source(path) if source is None else source
    config = read_config(path, source) if config is None else config
    model, family = build_config(config), find_family(config)
    table = family.table(config)
    if isinstance(source, GGUFFile):
        table = gguf_table(config, table)
    if "unembed" not in model.flat_parameters():
        # Files of tied models may hold the head too; transformers reads the embedding.
        source = Without(source, _HEADS)
    source = with_prefix(source, family.prefix)
    params, model_state = assembled(
        model, table, source, skipped=family.skipped(config)
    )
    return Weights(
        config=config,
        model=model,
        params=params,
        model_state=model_state,
        source=source,
    )


def _is_gguf(path: str | Path) -> bool:
    return Path(path).suffix == GGUF
