"""A checkpoint of a run as a folder that `transformers` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshpar import InputError
from meshpar.models.convert.stored_config import config_of_sizes
from meshpar.models.convert.writing import write_weights
from meshpar.train.checkpoint_arrays import read_arrays


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
            from when absent.

    Raises:
        CheckpointError: There is no such checkpoint, or it cannot be read.
        InputError: It says nothing of its model, no model of theirs is like it, or
            `like` is no folder.
    """
    contents, arrays = read_arrays(Path(checkpoint), step)
    sizes = contents.config.get("model_sizes")
    if not sizes:
        raise InputError(
            f"the checkpoint of step {contents.step} in {contents.directory!r} does "
            "not say what its model is; write it with meshpar.models.convert.writing"
        )
    config = config_of_sizes(sizes)
    if like is None and contents.config.get("from_weights"):
        started = Path(contents.config["from_weights"])
        like = started if started.is_dir() else None
    files = write_weights(
        to,
        config,
        arrays["params"],
        arrays.get("model_state"),
        dtype=dtype,
        like=like,
    )
    return {
        "folder": str(to),
        "step": contents.step,
        "dtype": dtype,
        "files": sorted(path.name for path in Path(to).iterdir()),
        "bytes": sum(file.stat().st_size for file in files),
    }
