"""What lies beside the arrays in the folder of a run's checkpoints."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

from meshpar.foreign_files import read_json_object


def read_run(folder: Path) -> dict[str, Any]:
    """What the checkpoint of a folder says of its run.

    Raises:
        InputError: It says nothing that can be read.
    """
    return read_json_object(
        folder / "run" / "metadata",
        key="checkpoint.unreadable",
        shape_key="checkpoint.unreadable",
    )


def move_aside(folder: Path) -> None:
    """Renames a step's folder to `damaged-STEP`, or -2 and so on after that."""
    if not folder.exists():
        return
    aside = folder.with_name(f"damaged-{folder.name}")
    others = (aside.with_name(f"{aside.name}-{n}") for n in itertools.count(2))
    folder.rename(next(p for p in itertools.chain([aside], others) if not p.exists()))


def remove_parts(directory: Path, step: str = "*") -> None:
    """Deletes what is there of checkpoints that never got whole.

    Args:
        directory: Of the checkpoints of a run that is saving none of those steps.
        step: Of which step; of every one when absent.
    """
    for path in directory.glob(f"{step}.orbax-checkpoint-tmp*"):
        shutil.rmtree(path, ignore_errors=True)
