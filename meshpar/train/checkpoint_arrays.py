"""The arrays of a checkpoint on the host, each read part by part."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshpar.layout import Layout
from meshpar.rules.sharding import insert
from meshpar.train.checkpoint_contents import Contents, read_contents
from meshpar.train.checkpoint_errors import (
    CheckpointError,
    explained,
    warn_unchecked,
)
from meshpar.train.stored_arrays import chunk_cache, opened


@dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint, of which any part can be read.

    Args:
        folder: Of the checkpoint's state.
        path: Of the array, such as `("params", "blocks", "mlp", "down")`.
        shape: Global, layers first to last.
        of_replicas: Whether the file has one of each replica of local steps, of which
            this is the mean, or the first one's where it counts.
        cache: Keeps chunks that were read; None for none.
    """

    folder: Path
    path: tuple[str, ...]
    shape: tuple[int, ...]
    of_replicas: bool = False
    cache: Any = field(default=None, compare=False, repr=False)

    def __getitem__(self, index: Any) -> np.ndarray:
        """A part, as NumPy's: a slice for each of the first dims.

        No chunk of the file is read that has nothing of it, and none again that the
        cache has.
        """
        index = index if isinstance(index, tuple) else (index,)
        index = tuple(one for one in index if one is not Ellipsis)
        parts = zip(index, self.shape, strict=False)
        spans = [slice(*one.indices(size)[:2]) for one, size in parts]
        if self.of_replicas:
            spans = [slice(None), *spans]
        with self._explained():
            found = np.asarray(self._source[tuple(spans)].read().result())
        return _mean(found) if self.of_replicas else found

    @cached_property
    def _source(self) -> Any:
        with self._explained():
            return opened(self.folder, ".".join(self.path), self.cache)

    def _explained(self) -> AbstractContextManager[None]:
        what = f"{'.'.join(self.path)} in {str(self.folder)!r} cannot be read"
        return explained(self.folder, what)


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
            f"{contents.damage}",
            key="checkpoint.damaged",
        )
    if not contents.has_checksums:
        warn_unchecked(contents.step, contents.directory)
    folder = (Path(contents.directory) / str(contents.step) / "state").absolute()
    tree: dict[str, Any] = {}
    for place, array in _model_arrays(contents, folder):
        insert(tree, place, array)
    return contents, tree


def _model_arrays(
    contents: Contents, folder: Path
) -> Iterator[tuple[tuple[str, ...], StoredArray]]:
    """Parameters and state of the model, and where in the tree each is."""
    cache = chunk_cache()
    shapes = {tuple(one.path.split(".")): one.shape for one in contents.arrays}
    layout = contents.layout
    is_local = layout is not None and Layout.parse(layout).sync_every > 1
    start = _start(contents, shapes) if is_local else ()
    for keys, shape in shapes.items():
        if keys[0] == "model_state" and is_local:
            yield keys, StoredArray(folder, keys, shape[1:], True, cache)
        elif keys[0] == "model_state" or keys[0] == "params" and not is_local:
            yield keys, StoredArray(folder, keys, shape, cache=cache)
        elif is_local and keys[: len(start)] == start:
            place = ("params", *keys[len(start) :])
            yield place, StoredArray(folder, keys, shape, cache=cache)


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
        "common; go on with its run, and save it anew",
        key="checkpoint.no_common_parameters",
    )
