"""The arrays of a checkpoint on the host, one at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from meshpar.layout import Layout
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
        of_replicas: Whether the file has one of each replica of local steps, of which
            this is the mean, or the first one's where it counts.
    """

    folder: Path
    path: tuple[str, ...]
    shape: tuple[int, ...]
    last: dict[tuple[str, ...], np.ndarray] = field(repr=False, compare=False)
    of_replicas: bool = False

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
        return _mean(np.asarray(found)) if self.of_replicas else np.asarray(found)


def _mean(array: np.ndarray) -> np.ndarray:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array[0]
    return np.mean(array.astype(np.float32), 0).astype(array.dtype)


def read_arrays(path: Path, step: int | None = None) -> tuple[Contents, dict[str, Any]]:
    """What a checkpoint says of itself, and its arrays as a tree, none read yet.

    Of local steps the parameters are those that the replicas last had in common, as
    `TrainStep.parameters` has them, and the model's state is the replicas' mean.

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
    for place, array in _model_arrays(contents, folder, last):
        insert(tree, place, array)
    return contents, tree


def _model_arrays(
    contents: Contents, folder: Path, last: dict[tuple[str, ...], np.ndarray]
) -> Iterator[tuple[tuple[str, ...], StoredArray]]:
    """Parameters and state of the model, and where in the tree each is."""
    shapes = {tuple(one.path.split(".")): one.shape for one in contents.arrays}
    layout = contents.layout
    is_local = layout is not None and Layout.parse(layout).sync_every > 1
    start = _start(contents, shapes) if is_local else ()
    for keys, shape in shapes.items():
        if keys[0] == "model_state" and is_local:
            yield keys, StoredArray(folder, keys, shape[1:], last, of_replicas=True)
        elif keys[0] == "model_state" or keys[0] == "params" and not is_local:
            yield keys, StoredArray(folder, keys, shape, last)
        elif is_local and keys[: len(start)] == start:
            place = ("params", *keys[len(start) :])
            yield place, StoredArray(folder, keys, shape, last)


def _start(contents: Contents, paths: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    """Where an optimizer state has what replicas have in common (`WithOuter.start`)."""
    params = {path[1:] for path in paths if path[0] == "params"}
    # The second is beside parameters that are kept in fp32 (`Mastered`).
    for above in (("opt_state", "start"), ("opt_state", "inner", "start")):
        found = {path[len(above) :] for path in paths if path[: len(above)] == above}
        if found == params:
            return above
    raise CheckpointError(
        f"checkpoint of step {contents.step} in {contents.directory!r} is of local "
        f"steps ({contents.layout}), and has no parameters that its replicas have in "
        "common; go on with its run, and save it anew"
    )
