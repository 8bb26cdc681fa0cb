"""What a run keeps in its folder of its tokenizer and of the model it started from.

A checkpoint may come from anybody. Whoever reads one opens only files of the run's own
folder; any other file is one that the user names on the command line.
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
    """Copies a tokenizer and the settings of a model into the folder of a run.

    Args:
        run: The folder; made when absent.
        tokenizer: A `tokenizer.json`.
        started_from: The folder of a model, or of another run. A file, such as GGUF,
            has no settings of its own, and of one that is gone nothing is copied.
    """
    run = Path(run)
    if tokenizer is not None:
        _copy(Path(tokenizer), run / TOKENIZER)
    if started_from is None or not Path(started_from).is_dir():
        return
    for folder in (Path(started_from) / _BASE, Path(started_from)):
        for name in ("config.json", *tokenizer_files(folder)):
            if (folder / name).is_file():
                _copy(folder / name, run / _BASE / name)


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


def run_folder(checkpoints: str | Path) -> Path:
    """The folder of a run whose checkpoints are in a folder."""
    folder = Path(checkpoints)
    return folder.parent if folder.name == "checkpoints" else folder


def kept_tokenizer(
    run: Path, description: Mapping[str, Any], *, instead: str
) -> Path | None:
    """The copy of a run's `tokenizer.json`; None of a run without one.

    Args:
        run: Its folder.
        description: What a checkpoint says of the run.
        instead: What to do where there is no copy, for the error.

    Raises:
        InputError: The checkpoint names a tokenizer, and the folder has no copy.
    """
    named = description.get("tokenizer")
    if not named:
        return None
    if not (run / TOKENIZER).is_file():
        raise InputError(
            f"the run's tokenizer {named!r} is not kept in {str(run)!r}, and no other "
            f"file is read because a checkpoint names it; {instead}",
            key="weights.tokenizer_gone",
        )
    return _inside(run, run / TOKENIZER)


def kept_base(run: Path, description: Mapping[str, Any]) -> Path | None:
    """The folder with files of the model that a run started from, None without.

    Raises:
        InputError: A file of it is a link to a file outside of the run's folder, or the
            run started from a folder and has kept nothing of it.
    """
    base, started = run / _BASE, description.get("from_weights")
    if base.is_dir():
        for name in ("config.json", *tokenizer_files(base)):
            _inside(run, base / name)
        return base
    if started and Path(started).suffix != ".gguf":
        raise InputError(
            f"the run started from {started!r} and keeps no copy of its settings in "
            f"{str(base)!r}; give --like DIR, a folder with the tokenizer and the "
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
