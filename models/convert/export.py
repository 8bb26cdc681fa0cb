"""A checkpoint of a run as a folder that `transformers` loads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshpar.errors import InputError
from meshpar.foreign_files import read_json
from meshpar.models.convert.run import is_of_tokens, read_checkpoint
from meshpar.models.convert.writing import write_weights

_TOKENIZER = "tokenizer.json"


def export(
    checkpoint: str | Path,
    to: str | Path,
    *,
    step: int | None = None,
    dtype: str = "fp32",
    like: str | Path | None = None,
) -> dict[str, Any]:
    """Writes the parameters of a checkpoint; returns what was written, as plain values.

    Args:
        checkpoint: The folder of a run, of its checkpoints, or of one of them.
        to: Folder to write.
        step: Which checkpoint; the newest when absent.
        dtype: Of what is written: `fp32`, `bf16` or `fp16`.
        like: A folder whose tokenizer files are copied. When absent the tokenizer of
            the run's data is, beside the other files of the folder that it started from
            where that has the same tokens; of files of tokens that folder's is.

    Raises:
        CheckpointError: There is no such checkpoint, or it cannot be read.
        InputError: It says nothing of its model, no model of theirs is like it, its
            tokenizer is gone, or `like` is no folder.
    """
    found = read_checkpoint(
        checkpoint, step, instead="write it with meshpar.models.convert.writing"
    )
    contents = found.contents
    said, started = contents.config, None
    own = said.get("tokenizer") if like is None else None
    if own and not Path(own).is_file():
        raise InputError(
            f"the run's tokenizer {own!r} is gone, and what is exported would have "
            f"none; put it back, or give --like DIR, a folder with its {_TOKENIZER}",
            key="weights.tokenizer_gone",
        )
    if like is None and said.get("from_weights"):
        folder = Path(said["from_weights"])
        started = folder if folder.is_dir() else None
        like = folder if started and _reads_as(said, folder) else None
    files = write_weights(
        to,
        found.config,
        found.params,
        found.model_state,
        dtype=dtype,
        like=like,
        longest_like=started,
    )
    if own:
        shutil.copyfile(own, Path(to) / _TOKENIZER)
    return {
        "folder": str(to),
        "step": contents.step,
        "dtype": dtype,
        "files": sorted(path.name for path in Path(to).iterdir()),
        "bytes": sum(file.stat().st_size for file in files),
    }


def _reads_as(said: Mapping[str, Any], folder: Path) -> bool:
    """Whether a run's tokens are those of a folder's tokenizer, as far as is known."""
    own, theirs = said.get("tokenizer"), folder / _TOKENIZER
    if not own:  # Bytes, or files of tokens, of `meshpar train`, which names its text.
        return is_of_tokens(said) or "text" not in said
    tokens = _tokens(Path(own))
    return tokens is not None and tokens == _tokens(theirs)


def _tokens(tokenizer: Path) -> tuple[Any, Any] | None:
    """Which token each number of a tokenizer.json is; None where that is unknown."""
    try:
        found = read_json(tokenizer, key="data.unreadable_tokenizer", most=1 << 28)
        added = {one["id"]: one["content"] for one in found["added_tokens"]}
        return found["model"]["vocab"], added
    except (ValueError, LookupError, TypeError):
        return None
