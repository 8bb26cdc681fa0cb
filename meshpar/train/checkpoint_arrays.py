"""The arrays of a checkpoint on the host, one at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from meshpar.rules.sharding import insert
from meshpar.train.checkpoint_contents import Contents, read_contents
from meshpar.train.checkpoint_errors import CheckpointError, explained


@dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint; the last that was read stays in memory, no other.

    Args:
        folder: Of the checkpoint's state.
        path: Of the array, such as `("params", "blocks", "mlp", "down")`.
        shape: Global, layers first to last.
        last: What was read last, shared by all arrays.
    """

    folder: Path
    path: tuple[str, ...]
    shape: tuple[int, ...]
    last: dict[tuple[str, ...], np.ndarray] = field(repr=False, compare=False)

    def __getitem__(self, index: Any) -> np.ndarray:
        """A part, as NumPy's."""
        if self.path not in self.last:
            self.last.clear()
            self.last[self.path] = self._read()
        return self.last[self.path][index]

    def _read(self) -> np.ndarray:
        item: dict[str, Any] = {}
        wanted: dict[str, Any] = {}
        insert(item, self.path, np.zeros(()))
        insert(wanted, self.path, ocp.RestoreArgs(restore_type=np.ndarray))
        what = f"{'.'.join(self.path)} in {str(self.folder)!r} cannot be read"
        with explained(self.folder, what):
            found: Any = ocp.PyTreeCheckpointHandler().restore(
                self.folder,
                args=ocp.args.PyTreeRestore(
                    item=item, restore_args=wanted, partial_restore=True
                ),
            )
        for key in self.path:
            found = found[key]
        return np.asarray(found)


def read_arrays(path: Path, step: int | None = None) -> tuple[Contents, dict[str, Any]]:
    """What a checkpoint says of itself, and its arrays as a tree, none read yet.

    Args:
        path: The folder of a run, of its checkpoints, or of one of them.
        step: Which; the newest when absent.

    Raises:
        CheckpointError: There is none, or its files are not as they were written.
    """
    contents = read_contents(path, step)
    if contents.damage:
        raise CheckpointError(
            f"checkpoint of step {contents.step} in {contents.directory!r} is damaged: "
            f"{contents.damage}"
        )
    folder = (Path(contents.directory) / str(contents.step) / "state").absolute()
    last: dict[tuple[str, ...], np.ndarray] = {}
    tree: dict[str, Any] = {}
    for array in contents.arrays:
        keys = tuple(array.path.split("."))
        if keys[0] in ("params", "model_state"):
            insert(tree, keys, StoredArray(folder, keys, array.shape, last))
    return contents, tree
