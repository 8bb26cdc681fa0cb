"""The contents of a checkpoint, read without a model, its arrays part by part."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
from optax import contrib

from meshpar.errors import InputError, local_path
from meshpar.foreign_files import json_type
from meshpar.layout import Layout
from meshpar.rules.sharding import insert
from meshpar.train.checkpoint.choice import CheckpointError, explained, warn_unchecked
from meshpar.train.checkpoint.files import damage, has_checksums, read_run
from meshpar.train.checkpoint.stored_arrays import chunk_cache, opened, stored

_DATA = ("data", "windows", "text", "seq", "global_batch")
"""Names in a run's description that give its place in its data."""

_NO_CONFIG = ("layout", "data", "windows")
"""Names in it that are no options."""


@dataclass(frozen=True, kw_only=True)
class ArrayFound:
    """One array of a checkpoint.

    Args:
        path: Such as params.blocks.mlp.down.
        shape: Global, layers first to last.
        dtype: As stored.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of all its values."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A checkpoint without the values of its arrays.

    Args:
        directory: Folder of the run's checkpoints.
        step: Steps done.
        steps: Steps of all checkpoints there.
        layout: The layout that wrote it; None if it is not noted.
        config: Options of its run.
        data: The run's place in its data.
        arrays: Every array.
        damage: Damage of its files, in words; None without any.
        has_checksums: Whether it has checksums; without them damage is not found.
    """

    directory: str
    step: int
    steps: list[int]
    layout: str | None
    config: dict[str, Any]
    data: dict[str, Any]
    arrays: list[ArrayFound]
    damage: str | None
    has_checksums: bool

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def read_contents(path: Path, step: int | None = None) -> Contents:
    """Return the contents of a checkpoint, without its arrays.

    Args:
        path: The folder of a run, of its checkpoints, or of one of them.
        step: The step; the newest when absent.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    directory, named = _found(local_path("checkpoint", path))
    steps = saved_steps(directory)
    chosen = next(one for one in (step, named, steps[-1]) if one is not None)
    if chosen not in steps:
        raise CheckpointError(
            f"no checkpoint of step {chosen} in {str(directory)!r}; there are "
            f"{', '.join(map(str, steps))}",
            key="checkpoint.no_such_step",
        )
    folder = directory.absolute() / str(chosen)
    what = f"checkpoint of step {chosen} in {str(directory)!r} cannot be read"
    with explained(directory, what):
        # Not by a manager, which logs warnings of what it cannot write here.
        run, arrays = read_run(folder), stored(folder / "state")
        layout = run.get("layout")
        if not isinstance(layout, str | None):
            raise ValueError(f"its layout is {json_type(layout)}, not a text")
    return Contents(
        directory=str(directory),
        step=chosen,
        steps=steps,
        layout=layout,
        config={name: run[name] for name in run if name not in _NO_CONFIG},
        data={name: run[name] for name in _DATA if name in run},
        arrays=[
            ArrayFound(path=path, shape=tuple(one.shape), dtype=str(one.dtype))
            for path, one in arrays.items()
        ],
        damage=damage(directory / str(chosen)),
        has_checksums=has_checksums(directory / str(chosen)),
    )


def _found(path: Path) -> tuple[Path, int | None]:
    """Return the folder of checkpoints, and the step that the path itself names."""
    if not path.is_dir():
        raise CheckpointError(
            f"no folder {str(path)!r}; name a run's or a checkpoint's",
            key="checkpoint.missing_folder",
        )
    if path.name.isdecimal() and (path / "state").is_dir():
        return path.parent, int(path.name)
    for directory in (path / "checkpoints", path):
        if directory.is_dir() and saved_steps(directory):
            return directory, None
    raise CheckpointError(
        f"no checkpoint in {str(path)!r}; name the folder of a run (--out), of its "
        "checkpoints, or of one of them",
        key="checkpoint.none_in_folder",
    )


def saved_steps(directory: Path) -> list[int]:
    """Return the steps of a folder's checkpoints, in order."""
    return sorted(
        int(path.name)
        for path in directory.iterdir()
        if path.name.isdecimal() and path.is_dir()
    )


@dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint, of which any part can be read.

    Args:
        folder: Of the checkpoint's state.
        path: Of the array, such as `("params", "blocks", "mlp", "down")`.
        shape: Global, layers first to last.
        per_replica: Whether the file has one of each replica of local steps, of which
            this is the mean, or the first one's where it counts.
        cache: Keeps chunks that were read; None for none.
    """

    folder: Path
    path: tuple[str, ...]
    shape: tuple[int, ...]
    per_replica: bool = False
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
        if self.per_replica:
            spans = [slice(None), *spans]
        with self._explained():
            found = np.asarray(self._source[tuple(spans)].read().result())
        if not self.per_replica:
            return found
        if not jnp.issubdtype(found.dtype, jnp.floating):
            return found[0]  # A counter, equal in all replicas.
        return np.mean(found.astype(np.float32), 0).astype(found.dtype)

    @cached_property
    def _source(self) -> Any:
        with self._explained():
            return opened(self.folder, ".".join(self.path), self.cache)

    def _explained(self) -> AbstractContextManager[None]:
        what = f"{'.'.join(self.path)} in {str(self.folder)!r} cannot be read"
        return explained(self.folder, what)


@dataclass(frozen=True)
class ScheduleFreeArray:
    """The average of a parameter that `optax.contrib.schedule_free` trains.

    Args:
        trained: The parameter.
        fast: The array `z` of the optimizer's state.
        beta1: The optimizer's `b1`.
    """

    trained: StoredArray
    fast: StoredArray
    beta1: StoredArray

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape, layers first to last."""
        return self.trained.shape

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return a part, as `StoredArray` does."""
        state = SimpleNamespace(b1=self.beta1[()], z=self.fast[index])
        return contrib.schedule_free_eval_params(state, self.trained[index])


def read_arrays(
    path: Path, step: int | None = None, *, average: bool = False
) -> tuple[Contents, dict[str, Any]]:
    """Return the contents of a checkpoint, and its arrays as a tree, none read yet.

    With local steps the parameters are those that the replicas last had in common, as
    in `TrainStep.parameters`, and the model's state is the replicas' mean.

    Args:
        path: The folder of a run, of its checkpoints, or of one of them.
        step: The step; the newest when absent.
        average: Return the optimizer's average of the parameters in their place.

    Raises:
        CheckpointError: There is none, or its files are not as they were written.
        InputError: `average` of a checkpoint without one.
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
    if average:
        for place, averaged in _averages(contents, folder):
            insert(tree, place, averaged)
    return contents, tree


def _averages(
    contents: Contents, folder: Path
) -> Iterator[tuple[tuple[str, ...], StoredArray | ScheduleFreeArray]]:
    """Yield the average of each parameter, and the parameter's place in the tree."""
    cache = chunk_cache()
    shapes = {tuple(one.path.split(".")): one.shape for one in contents.arrays}
    above = _average_path(contents, shapes)
    for keys, shape in shapes.items():
        if keys[0] != "params":
            continue
        kept = StoredArray(folder, (*above, *keys[1:]), shape, cache=cache)
        if above[-1] == "average":
            yield keys, kept
        else:
            trained = StoredArray(folder, keys, shape, cache=cache)
            beta1 = StoredArray(folder, (*above[:-1], "b1"), (), cache=cache)
            yield keys, ScheduleFreeArray(trained, kept, beta1)


def _average_path(
    contents: Contents, paths: Collection[tuple[str, ...]]
) -> tuple[str, ...]:
    """Return the path of the averages (`optimizer.average`), or of schedule-free's z.

    Raises:
        InputError: There are none.
    """
    params = {path[1:] for path in paths if path[0] == "params"}
    starts = {path[: at + 1] for path in paths for at in range(len(path))}
    for above in sorted(starts):
        if above[0] == "opt_state" and above[-1] in ("average", "z"):
            found = {
                path[len(above) :] for path in paths if path[: len(above)] == above
            }
            if found == params:
                return above
    raise InputError(
        f"checkpoint of step {contents.step} in {contents.directory!r} has no average "
        "of the parameters: its run had neither --ema-decay nor an optimizer that "
        "keeps one; leave the average out",
        key="checkpoint.no_average",
    )


def _model_arrays(
    contents: Contents, folder: Path
) -> Iterator[tuple[tuple[str, ...], StoredArray]]:
    """Yield parameters and state of the model, and the place of each in the tree."""
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
    """Return the path of the replicas' common parameters (`WithOuter.start`)."""
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


_TEXT, _WHOLE, _NUMBER = (str,), (int,), (int, float)
_OBJECT = (dict,)
_MOST = 1 << 63
"""Limit of a whole number, which is a count."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("layout", "layout_asked", "data", "chat_date"), _TEXT),
    "optimizer": _TEXT,
    "ema_decay": (*_NUMBER, type(None)),
    **dict.fromkeys(("tokenizer", "eos", "from_weights"), (*_TEXT, type(None))),
    **dict.fromkeys(("seed", "steps", "global_batch", "seq", "windows"), _WHOLE),
    "decay_steps": (*_WHOLE, type(None)),
    "learning_rate": _NUMBER,
    "model_sizes": _OBJECT,
    "lora": (*_OBJECT, type(None)),
}
"""Name -> its types, if it is there."""

_LISTS: Mapping[str, type] = {
    **dict.fromkeys(("text", "sources", "validation_data", "formats"), str),
    "stop_tokens": int,
}
"""Name -> type of the list's items, if it is there."""


def check_description(said: Mapping[str, Any], where: str) -> None:
    """Check that what a checkpoint says of its run has the types that a run writes.

    A checkpoint may come from anybody, and may lack a name that this version writes.

    Args:
        said: By name; others than a recipe writes may have any type.
        where: The checkpoint, for the error.

    Raises:
        CheckpointError: A value is of another type.
    """
    for name, value in said.items():
        if name in _TYPES:
            is_right = _is_type(value, _TYPES[name])
        elif name in _LISTS:
            kind = (_LISTS[name],)
            is_list = isinstance(value, list | tuple)
            is_right = is_list and all(_is_type(one, kind) for one in value)
        else:
            is_right = True
        if not is_right:
            raise CheckpointError(
                f"{where} says of its run {name}={reprlib.repr(value)} "
                f"({json_type(value)}), which no run writes: its file run/metadata is "
                "of something else, or was changed",
                key="checkpoint.unreadable",
            )


def _is_type(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool) or not isinstance(value, kinds):
        return False
    return not isinstance(value, int) or 0 <= value < _MOST
