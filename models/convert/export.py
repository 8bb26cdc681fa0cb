"""A checkpoint of a run as a folder that `transformers` loads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshpar.foreign_files import read_json
from meshpar.models.convert.run import has_token_files, read_checkpoint
from meshpar.models.convert.run_files import (
    TOKENIZER,
    kept_base,
    kept_tokenizer,
    run_folder,
)
from meshpar.models.convert.writing import write_weights


def export(
    checkpoint: str | Path,
    to: str | Path,
    *,
    step: int | None = None,
    dtype: str = "fp32",
    like: str | Path | None = None,
    average: bool = False,
) -> dict[str, Any]:
    """Writes the parameters of a checkpoint; returns what was written, as plain values.

    Args:
        checkpoint: The folder of a run, of its checkpoints, or of one of them.
        to: Folder to write.
        step: Which checkpoint; the newest when absent.
        dtype: Of what is written: `fp32`, `bf16` or `fp16`.
        like: Folder to copy tokenizer files from. Default: the run's own copies, and
            those of its base model if both tokenizers are equal.
        average: Write the run's average of the parameters (`--ema-decay`, or that of
            `schedule_free`) in place of the trained ones.

    Raises:
        CheckpointError: There is no such checkpoint, or it cannot be read.
        InputError: It says nothing of its model, no model of theirs is like it, its
            folder has no copy of its tokenizer, `like` is no folder, or it has no
            average.
    """
    found = read_checkpoint(
        checkpoint,
        step,
        instead="write it with meshpar.models.convert.writing",
        average=average,
    )
    contents = found.contents
    said, run = contents.config, run_folder(contents.directory)
    own = base = None
    if like is None:
        instead = f"give --like DIR, a folder with its {TOKENIZER}"
        own, base = kept_tokenizer(run, said, instead=instead), kept_base(run, said)
        like = base if base and _reads_as(said, own, base) else None
    files = write_weights(
        to,
        found.config,
        found.params,
        found.model_state,
        dtype=dtype,
        like=like,
        longest_like=base,
        stop_tokens=said.get("stop_tokens"),
    )
    if own:
        shutil.copyfile(own, Path(to) / TOKENIZER)
    return {
        "folder": str(to),
        "step": contents.step,
        "dtype": dtype,
        "files": sorted(path.name for path in Path(to).iterdir()),
        "bytes": sum(file.stat().st_size for file in files),
    }


def _reads_as(said: Mapping[str, Any], own: Path | None, base: Path) -> bool:
    """Return False if a run's tokens are known to differ from a tokenizer's."""
    if own is None:  # Bytes, or files of tokens, of `meshpar train`, which has a text.
        return has_token_files(said) or "text" not in said
    tokens = _tokens(own)
    return tokens is not None and tokens == _tokens(base / TOKENIZER)


def _tokens(tokenizer: Path) -> tuple[Any, Any] | None:
    """Which token each number of a tokenizer.json is; None where that is unknown."""
    try:
        found = read_json(tokenizer, key="data.unreadable_tokenizer", most=1 << 28)
        added = {one["id"]: one["content"] for one in found["added_tokens"]}
        return found["model"]["vocab"], added
    except (ValueError, LookupError, TypeError):
        return None
