"""What a checkpoint holds, read without its arrays and without a model."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from meshpar.errors import local_path
from meshpar.foreign_files import json_type
from meshpar.train.checkpoint_errors import CheckpointError, explained
from meshpar.train.checksums import damage, has_checksums
from meshpar.train.folders import read_run
from meshpar.train.stored_arrays import stored

_DATA = ("data", "windows", "text", "seq", "global_batch")
"""What a run's description says of where its data stand."""

_NO_CONFIG = ("layout", "data", "windows")
"""What of it is no option."""


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
        """Of all its values."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A checkpoint but for the values of its arrays.

    Args:
        directory: Of the run's checkpoints.
        step: Steps done.
        steps: Of all checkpoints there.
        layout: That wrote it; None where nobody said.
        config: Options of its run.
        data: Where the run stood in its data.
        arrays: All of them.
        damage: What is wrong with its files; None where they are as written.
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
        """Plain values, for JSON."""
        return asdict(self)


def read_contents(path: Path, step: int | None = None) -> Contents:
    """What is in a checkpoint.

    Args:
        path: The folder of a run, of its checkpoints, or of one of them.
        step: Which; the newest when absent.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    directory, named = _found(local_path("checkpoint", path))
    steps = steps_of(directory)
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
    """The folder of checkpoints, and the step that the path itself names."""
    if not path.is_dir():
        raise CheckpointError(
            f"no folder {str(path)!r}; name a run's or a checkpoint's",
            key="checkpoint.missing_folder",
        )
    if path.name.isdecimal() and (path / "state").is_dir():
        return path.parent, int(path.name)
    for directory in (path / "checkpoints", path):
        if directory.is_dir() and steps_of(directory):
            return directory, None
    raise CheckpointError(
        f"no checkpoint in {str(path)!r}; name the folder of a run (--out), of its "
        "checkpoints, or of one of them",
        key="checkpoint.none_in_folder",
    )


def steps_of(directory: Path) -> list[int]:
    """Of the checkpoints of a folder, in order."""
    return sorted(
        int(path.name)
        for path in directory.iterdir()
        if path.name.isdecimal() and path.is_dir()
    )
