"""Files that a run keeps: its tokenizer and the settings of its base model.

A checkpoint may be untrusted: these functions open only files in the run's folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshpar.errors import InputError
from meshpar.models.convert.stored_chat import MORE_TEMPLATES

TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json"),
    *("chat_template.jinja", "generation_config.json", "preprocessor_config.json"),
)
_BASE = "base"
"""Folder within a run's, of files of the model that it started from."""


def keep_files(
    run: str | Path,
    *,
    tokenizer: str | Path | None = None,
    started_from: str | Path | None = None,
) -> None:
    """Copy a tokenizer and the settings of a model into the folder of a run.

    Args:
        run: The folder; made when absent.
        tokenizer: A `tokenizer.json`.
        started_from: The folder of a model, of another run or of its checkpoints. A
            file, such as GGUF, has no settings to copy.

    Raises:
        InputError: A file of the other run is a link to a file outside of its folder.
    """
    run = Path(run)
    if tokenizer is not None:
        _copy(Path(tokenizer), run / TOKENIZER)
    if started_from is None or not Path(started_from).is_dir():
        return
    (run / _BASE).mkdir(parents=True, exist_ok=True)
    source = run_folder(started_from)
    is_run = (source / "checkpoints").is_dir()
    for folder in (source / _BASE, source):
        for name in ("config.json", *tokenizer_files(folder)):
            if (folder / name).is_file():
                # Of a model's own folder, links into a cache are usual.
                file = _inside(source, folder / name) if is_run else folder / name
                _copy(file, run / _BASE / name)


def tokenizer_files(folder: str | Path) -> list[str]:
    """Names of the files of a tokenizer in a folder, chat templates with them."""
    folder = Path(folder)
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()] + [
        f"{MORE_TEMPLATES}/{file.name}" for file in more if file.is_file()
    ]


def copy_tokenizer(source: str | Path, folder: str | Path) -> list[str]:
    """Copies the files of a tokenizer that are there, and returns their names."""
    names = tokenizer_files(source)
    for name in names:
        _copy(Path(source) / name, Path(folder) / name)
    return names


def run_folder(path: str | Path) -> Path:
    """The folder of a run, from that folder, its checkpoints or one of them."""
    folder = Path(path)
    if folder.name.isdecimal() and (folder / "state").is_dir():
        folder = folder.parent
    return folder.parent if folder.name == "checkpoints" else folder


def kept_tokenizer(
    run: Path, description: Mapping[str, Any], *, instead: str
) -> Path | None:
    """Return the run's copy of `tokenizer.json`; None if the run has none.

    Args:
        run: The run's folder.
        description: The description of the run in a checkpoint.
        instead: What to do if there is no copy, for the error.

    Raises:
        InputError: The checkpoint names a tokenizer, and the folder has no copy.
    """
    named = description.get("tokenizer")
    if not named:
        return None
    if not (run / TOKENIZER).is_file():
        raise InputError(
            f"the folder {str(run)!r} has no copy of the run's tokenizer {named!r}, "
            f"and paths in a checkpoint are not opened; {instead}",
            key="weights.tokenizer_gone",
        )
    return _inside(run, run / TOKENIZER)


def kept_base(run: Path, description: Mapping[str, Any]) -> Path | None:
    """Return the folder with the settings of the run's base model; None if it has none.

    Raises:
        InputError: A file of it is a link to a file outside of the run's folder, or the
            run has a base model and no such folder.
    """
    base, started = run / _BASE, description.get("from_weights")
    if base.is_dir():
        for name in ("config.json", *tokenizer_files(base)):
            _inside(run, base / name)
        return base
    if started and Path(started).suffix != ".gguf":
        raise InputError(
            f"the run started from {started!r}, and {str(base)!r} has no copy of its "
            "settings; give --like DIR, a folder with the tokenizer and the "
            "config.json of that model",
            key="weights.base_gone",
        )
    return None


def _inside(run: Path, file: Path) -> Path:
    if not file.resolve().is_relative_to(run.resolve()):
        raise InputError(
            f"{str(file)!r} is a link to {str(file.resolve())!r}, outside of the run's "
            "folder; put the file itself there",
            key="weights.file_outside_run",
        )
    return file


def _copy(file: Path, to: Path) -> None:
    """Copies a file; the new one appears whole, or the earlier one stays."""
    to.parent.mkdir(parents=True, exist_ok=True)
    unfinished = to.with_name(f"{to.name}.unfinished")
    shutil.copyfile(file, unfinished)
    os.replace(unfinished, to)
