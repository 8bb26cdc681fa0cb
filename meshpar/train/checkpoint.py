"""Checkpoints (Orbax) that any other layout can resume."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from meshpar.errors import InputError
from meshpar.rules.sharding import path_name
from meshpar.train.layer_order import (
    LayerOrder,
    arranged,
    in_model_order,
    model_order_structs,
)
from meshpar.train.portable import portable, unported
from meshpar.train.state import TrainState


class CheckpointError(InputError, RuntimeError):
    """A checkpoint that could not be written or read."""


class Checkpoints:
    """The checkpoints of one run, the newest few kept.

    Arrays are stored by their global index with layers first to last, and parameters
    once, as the master copy where there is one. So a run resumes on any layout of the
    same model, its stages and its `param_dtype` included: values that the layout stores
    in fewer bits are rounded to nearest.

    Args:
        directory: Where they lie; made when absent.
        keep: How many to keep.
        layer_orders: Where the layers of every array lie, `TrainStep.layer_orders`;
            first to last when absent.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 2,
        layer_orders: TrainState | None = None,
    ) -> None:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False
        )
        self.directory = Path(directory).absolute()
        self._layer_orders = layer_orders
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=options,
                # Named here, so that the shapes in a checkpoint can be asked for.
                item_handlers={
                    "state": ocp.StandardCheckpointHandler(),
                    "run": ocp.JsonCheckpointHandler(),
                },
            )
        except OSError as error:
            raise CheckpointError(
                f"cannot make the checkpoint folder {str(directory)!r}: "
                f"{error.strerror}"
            ) from error

    @property
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint; None when there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, run: dict[str, Any]) -> None:
        """Writes a state, and what describes its run, as one checkpoint.

        Args:
            state: What to keep.
            run: Plain JSON values: layout line, seed and so on.

        Raises:
            CheckpointError: It could not be written, for example on a full disk.
        """
        step = int(state.step)
        if step == self.latest_step:
            return
        where = repr(str(self.directory))
        what = f"checkpoint of step {step} not written to {where}"
        with self._explained(what), _logged_by_threads_withheld():
            orders = portable(self._orders_beside(state))
            stored = in_model_order(portable(state), orders)
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(stored), run=ocp.args.JsonSave(run)
            )
            self._manager.save(step, args=args)
            self._manager.wait_until_finished()

    def run_of_latest(self) -> dict[str, Any]:
        """What described the run at the newest checkpoint.

        Raises:
            CheckpointError: There is none, or it cannot be read.
        """
        return self._restore(run=ocp.args.JsonRestore())["run"]

    def restore(self, shapes: TrainState, shardings: TrainState) -> TrainState:
        """The newest state, laid out as `shardings` say, whatever layout wrote it.

        Args:
            shapes: `jax.ShapeDtypeStruct` of every array.
            shardings: The sharding of every array.

        Raises:
            CheckpointError: There is none, it cannot be read, or it is of another
                model: a global shape differs.
        """
        orders = portable(self._orders_beside(shapes))
        wanted = model_order_structs(portable(shapes), portable(shardings), orders)
        self._check_shapes(wanted)
        stored = self._restore(state=ocp.args.StandardRestore(wanted))["state"]
        with self._explained(self._unreadable):
            state = arranged(stored, orders, portable(shardings))
            return unported(state, shapes, shardings)

    def _orders_beside(self, state: TrainState) -> TrainState:
        if self._layer_orders is None:
            return jax.tree.map(lambda _: LayerOrder(), state)
        return self._layer_orders

    def _check_shapes(self, shapes: TrainState) -> None:
        stored = self._stored_shapes()
        for path, wanted in _shapes_by_path(shapes).items():
            if stored.get(path, wanted) != wanted:
                raise CheckpointError(
                    f"checkpoint of step {self.latest_step} in {str(self.directory)!r} "
                    f"is of another model: {path} has shape {stored[path]} there and "
                    f"{wanted} here; build the model with the sizes it was saved with, "
                    "or start without resuming"
                )

    def _stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """By path; empty where it cannot be told, which is for `_restore` to report."""
        try:
            metadata = self._manager.item_metadata(self.latest_step)["state"]
            return _shapes_by_path(getattr(metadata, "tree", metadata))
        except Exception:  # Orbax raises kinds of its own, and has None for absent.
            return {}

    def _restore(self, **items: Any) -> Any:
        step = self.latest_step
        if step is None:
            raise CheckpointError(
                f"no checkpoint in {str(self.directory)!r}; start without resuming, or "
                "name the folder of an earlier run"
            )
        with self._explained(self._unreadable):
            return self._manager.restore(step, args=ocp.args.Composite(**items))

    @property
    def _unreadable(self) -> str:
        return (
            f"checkpoint of step {self.latest_step} in {str(self.directory)!r} cannot "
            "be read"
        )

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Whatever goes wrong inside as a `CheckpointError`."""
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise kinds of their own.
            reason = _reason(error, self.directory)
            raise CheckpointError(f"{what}: {reason}") from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._manager.close()


@contextlib.contextmanager
def _logged_by_threads_withheld() -> Iterator[None]:
    """Drops the tracebacks that Orbax logs of an error that the block raises as well.

    Its threads log what ends them before the error comes to whoever waits for them.
    """
    logger, withheld = logging.getLogger("absl"), []

    def keep(record: logging.LogRecord) -> bool:
        if record.exc_info:
            withheld.append(record)
        return not record.exc_info

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
    for record in withheld:  # No error came of them, so that nobody else tells.
        logger.handle(record)


def _reason(error: Exception, directory: Path) -> str:
    """The first telling line of an error, or that the disk is full where it is."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Orbax introduces what it found by a line of its own that ends in a colon.
    telling = [line for line in lines if not line.endswith(":")] or lines
    space = os.statvfs(directory)
    free_bytes = space.f_bavail * space.f_frsize
    if free_bytes < 1 << 20 or "No space left" in text:
        return (
            f"the disk is full: {free_bytes:,} free bytes are too few; free some or "
            "name another"
        )
    return telling[0] if telling else type(error).__name__


def _shapes_by_path(tree: Any) -> dict[str, tuple[int, ...]]:
    return {
        path_name(path): tuple(leaf.shape)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
