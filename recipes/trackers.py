"""Programs that track runs and take the rows of metrics: TensorBoard, W&B, MLflow."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from meshpar import InputError
from meshpar.errors import install_extra
from meshpar.recipes.config import RunConfig

JSON_LINES = "jsonl"
"""Name of the tracker that every run has: its file of metrics."""

PACKAGES: Mapping[str, str] = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "mlflow": "mlflow",
}
"""Name of a tracker and of its extra -> the package that writes to it."""

_RUN_ID = "mlflow_run_id"
"""File of a run's folder that holds the number which MLflow gave the run."""


class Tracker(Protocol):
    """A program that takes a run's metrics."""

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Take the known values of a row."""

    def close(self) -> None:
        """End the run there."""


def tracker_names(config: RunConfig) -> list[str]:
    """Return the names of a run's trackers, without its file of metrics."""
    names = [*config.tracker, *(["tensorboard"] if config.tensorboard else [])]
    return [name for name in dict.fromkeys(names) if name != JSON_LINES]


def check_trackers(config: RunConfig) -> None:
    """Refuse trackers whose packages are not installed.

    Raises:
        InputError: There is one.
    """
    for name in tracker_names(config):
        package = PACKAGES[name]
        try:
            is_there = find_spec(package) is not None
        except ValueError:  # A module in place of the package, without a spec.
            is_there = True
        if not is_there:
            option = "--tracker " + name if name in config.tracker else f"--{name}"
            raise InputError(
                f"{option} needs {package}: {install_extra(name)}",
                key="run.missing_package",
            )


def open_trackers(config: RunConfig, done: int) -> dict[str, Tracker]:
    """Return the run's trackers by name.

    Args:
        config: Options of the run.
        done: Steps that the run resumes after.

    Raises:
        InputError: One is not installed, or does not begin.
    """
    check_trackers(config)
    trackers: dict[str, Tracker] = {}
    for name in tracker_names(config):
        package = importlib.import_module(PACKAGES[name])
        try:
            trackers[name] = _TRACKERS[name](package, config, done)
        except Exception as error:  # Any of theirs: no login, no server.
            for tracker in trackers.values():
                tracker.close()
            raise InputError(
                f"--tracker {name} does not begin: {error}; see the documentation of "
                f"{package.__name__}, or leave it out",
                key="run.tracker_does_not_begin",
            ) from error
    return trackers


class _TensorBoard:
    """Events in `--tensorboard`, or in OUT/tensorboard; later steps are forgotten."""

    def __init__(self, package: Any, config: RunConfig, done: int) -> None:
        folder = config.tensorboard or config.folder / "tensorboard"
        self._writer = package.SummaryWriter(str(folder), purge_step=done)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A run of Weights & Biases, which `WANDB_PROJECT` and others of its own name.

    Its number follows from the run's folder, so that a resumed run goes on there.
    """

    def __init__(self, package: Any, config: RunConfig, done: int) -> None:
        folder = config.folder.resolve()
        self._run = package.init(
            id=f"meshpar-{zlib.crc32(str(folder).encode()):08x}",
            name=folder.name,
            dir=str(folder),
            resume="allow",
            config=config.values(),
        )

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A run of MLflow, at `MLFLOW_TRACKING_URI`; its number is kept in the folder."""

    def __init__(self, package: Any, config: RunConfig, done: int) -> None:
        self._mlflow, file = package, config.folder / _RUN_ID
        if done and file.is_file():
            package.start_run(run_id=file.read_text(encoding="utf-8").strip())
            return
        run = package.start_run(run_name=config.folder.name)
        package.log_params(config.changed())
        _write(file, run.info.run_id)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(row), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n", encoding="utf-8")


_TRACKERS = {"tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow}
