"""A checkpoint of a run as a folder that `transformers` loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from meshpar.models.convert.run import read_checkpoint
from meshpar.models.convert.writing import write_weights


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
        like: A folder whose tokenizer files are copied; the one that the run started
            from when absent, or else the tokenizer of its data.

    Raises:
        CheckpointError: There is no such checkpoint, or it cannot be read.
        InputError: It says nothing of its model, no model of theirs is like it, or
            `like` is no folder.
    """
    found = read_checkpoint(
        checkpoint, step, instead="write it with meshpar.models.convert.writing"
    )
    contents = found.contents
    if like is None and contents.config.get("from_weights"):
        started = Path(contents.config["from_weights"])
        like = started if started.is_dir() else None
    files = write_weights(
        to,
        found.config,
        found.params,
        found.model_state,
        dtype=dtype,
        like=like,
    )
    tokenizer = contents.config.get("tokenizer")
    if like is None and tokenizer and Path(tokenizer).is_file():
        shutil.copyfile(tokenizer, Path(to) / "tokenizer.json")
    return {
        "folder": str(to),
        "step": contents.step,
        "dtype": dtype,
        "files": sorted(path.name for path in Path(to).iterdir()),
        "bytes": sum(file.stat().st_size for file in files),
    }
