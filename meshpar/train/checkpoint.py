"""Checkpoints (Orbax) that any other layout can resume."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from meshpar.distributed import Processes
from meshpar.rules.sharding import path_name
from meshpar.train.checkpoint_errors import (
    CheckpointError,
    DamagedCheckpointWarning,
    explained,
    reason_of,
)
from meshpar.train.checksums import damage, has_checksums
from meshpar.train.layer_order import (
    LayerOrder,
    arranged,
    in_model_order,
    model_order_structs,
)
from meshpar.train.portable import portable, unported
from meshpar.train.saving import Saving
from meshpar.train.state import TrainState

__all__ = ["CheckpointError", "Checkpoints", "DamagedCheckpointWarning"]


class Checkpoints:
    """The checkpoints of one run, the newest few kept.

    One appears whole or not at all, with checksums of its files. Where the newest is
    damaged, the one before it is read, and `damaged` and a warning say so.

    Arrays are stored by their global index with layers first to last, and parameters
    once, as the master copy where there is one. So a run resumes on any layout of the
    same model, its stages and its `param_dtype` included: values that the layout stores
    in fewer bits are rounded to nearest.

    Args:
        directory: Where they lie; made when absent.
        keep: How many to keep.
        keep_every: Keep each whose step divides by it, too.
        processes: Of this run; they share out what is checked.
        layer_orders: Where the layers of every array lie, `TrainStep.layer_orders`;
            first to last when absent.

    Attributes:
        directory: Where they lie.
        damaged: Step -> what is wrong with the checkpoints that were passed over.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 2,
        keep_every: int | None = None,
        layer_orders: TrainState | None = None,
        processes: Processes | None = None,
    ) -> None:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, keep_period=keep_every, enable_async_checkpointing=True
        )
        self.directory = Path(directory).absolute()
        self.damaged: dict[int, str] = {}
        self._chosen: int | None = None
        self._told: set[int] = set()
        self._processes = processes or Processes()
        self._saving: Saving | None = None
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

    @property
    def step_read(self) -> int | None:
        """Step of the checkpoint that `run_of_latest` or `restore` has read."""
        return self._chosen

    def save(
        self, state: TrainState, run: dict[str, Any], *, wait: bool = True
    ) -> None:
        """Writes a state, and what describes its run, as one checkpoint.

        Args:
            state: What to keep.
            run: Plain JSON values: layout line, seed and so on.
            wait: Until it is written; else only until it is copied, so that the state
                may be given to a step. What goes wrong then is an error of the next
                `save` or `finish`.

        Raises:
            CheckpointError: It could not be written, for example on a full disk, or,
                unless it waits, the one before it could not: of that a save that waits
                only warns. Those that are there already stay.
        """
        earlier, self._chosen = self._failure(), None
        step = int(state.step)
        self._move_damaged_aside()
        if step != self.latest_step:
            self._begin(step, state, run)
        if earlier and not wait:
            raise earlier
        if earlier:
            warnings.warn(str(earlier), stacklevel=2)
        if wait:
            self.finish()

    def forget_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps, which another run of them replaces.

        Raises:
            CheckpointError: What was being saved could not be written.
        """
        self.finish()
        for later in self._manager.all_steps():
            if later > step:
                self._manager.delete(later)

    def finish(self) -> None:
        """Waits until what is being saved is written.

        Raises:
            CheckpointError: It could not be.
        """
        failed = self._failure()
        if failed:
            raise failed

    def newest_good(self, at_most: int | None = None) -> int | None:
        """Step of the newest checkpoint without damage, which is what is read then.

        Every file is read once and compared with its checksum. None where there is no
        checkpoint, or a damaged one alone: reading that says what is wrong.

        Args:
            at_most: Only up to this step.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            if step in self.damaged or (at_most is not None and step > at_most):
                continue
            of = self._processes
            found = damage(
                self.directory / str(step),
                part=of.process_id,
                num_parts=of.num_processes,
            )
            told = [one for one in of.gather(found) if one]
            if not told:
                self._chosen = step
                return step
            self.damaged[step] = told[0]
        return None

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
        stored = self._restore(
            lambda: self._check_shapes(wanted), state=ocp.args.StandardRestore(wanted)
        )["state"]
        with explained(self.directory, self._unreadable(self._chosen)):
            state = arranged(stored, orders, portable(shardings))
            return unported(state, shapes, shardings)

    def _orders_beside(self, state: TrainState) -> TrainState:
        if self._layer_orders is None:
            return jax.tree.map(lambda _: LayerOrder(), state)
        return self._layer_orders

    def _begin(self, step: int, state: TrainState, run: dict[str, Any]) -> None:
        """Starts to save; what goes wrong is for `_failure` to tell."""
        orders = portable(self._orders_beside(state))
        stored = in_model_order(portable(state), orders)
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(stored), run=ocp.args.JsonSave(run)
        )
        self._saving = Saving(self._manager, self.directory, step)
        self._saving.begin(args, seals=self._processes.is_first)

    def _failure(self) -> CheckpointError | None:
        """Waits for what is being saved; what it failed of, if it did."""
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        error = saving.end()
        if error is None:
            return None
        with contextlib.suppress(OSError):
            self._manager.reload()  # It has forgotten those that are there.
        where = repr(str(self.directory))
        what = f"checkpoint of step {saving.step} not written to {where}"
        failure = CheckpointError(f"{what}: {reason_of(error, self.directory)}")
        failure.__cause__ = error
        return failure

    def _move_damaged_aside(self) -> None:
        """So that a run that goes on from an earlier one can save those steps again."""
        if not self.damaged:
            return
        told = None
        if self._processes.is_first:
            try:
                for step in self.damaged:
                    _move_aside(self.directory / str(step))
            except OSError as error:
                told = f"damaged checkpoints not moved aside: {error}"
        told = self._processes.gather(told)[0]
        if told:
            raise CheckpointError(told)
        self._manager.reload()
        self.damaged = {}

    def _check_shapes(self, shapes: TrainState) -> None:
        stored = self._stored_shapes()
        for path, wanted in _shapes_by_path(shapes).items():
            if path == "skipped" and stored.get(path, wanted) != wanted:
                had, has = (
                    shape[0] if shape else 1 for shape in (stored[path], wanted)
                )
                raise CheckpointError(
                    f"checkpoint of step {self._chosen} in {str(self.directory)!r} has "
                    f"the states of {had} replicas, but the layout has {has}: each has "
                    "an optimizer state of its own; keep 'data' and whether there are "
                    "local steps (sync_every above 1)"
                )
            if stored.get(path, wanted) != wanted:
                raise CheckpointError(
                    f"checkpoint of step {self._chosen} in {str(self.directory)!r} "
                    f"is of another model: {path} has shape {stored[path]} there and "
                    f"{wanted} here; build the model with the sizes it was saved with, "
                    "or start without resuming"
                )

    def _stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """By path; empty where it cannot be told, which is for `_restore` to report."""
        try:
            metadata = self._manager.item_metadata(self._chosen)["state"]
            return _shapes_by_path(getattr(metadata, "tree", metadata))
        except Exception:  # Orbax raises kinds of its own, and has None for absent.
            return {}

    def _restore(self, check: Callable[[], None] | None = None, **items: Any) -> Any:
        """Of the newest checkpoint that can be read.

        One whose files have the bytes that were written is no damaged one, whatever
        goes wrong while it is read.

        Raises:
            CheckpointError: There is none; of the newest, or of one without damage.
        """
        first: CheckpointError | None = None
        while True:
            step = self.newest_good() if self._chosen is None else self._chosen
            if step is None:
                raise first or CheckpointError(self._absent())
            self._tell_damaged(step)
            if check:
                check()
            try:
                with explained(self.directory, self._unreadable(step)):
                    return self._manager.restore(step, args=ocp.args.Composite(**items))
            except CheckpointError as error:
                first = first or error
                if self._processes.num_processes > 1:  # Others may have read theirs.
                    raise
                if has_checksums(self.directory / str(step)):
                    raise CheckpointError(
                        f"{error}; its files are as they were written, so that it is "
                        "not passed over"
                    ) from error
                self.damaged[step], self._chosen = str(error), None

    def _tell_damaged(self, step: int) -> None:
        for other, why in self.damaged.items():
            if other not in self._told:
                self._told.add(other)
                warnings.warn(
                    f"checkpoint of step {other} in {str(self.directory)!r} is "
                    f"damaged: {why}; that of step {step} is read in its place",
                    DamagedCheckpointWarning,
                    stacklevel=4,
                )

    def _absent(self) -> str:
        if self.damaged:
            step = max(self.damaged)
            return f"{self._unreadable(step)}: {self.damaged[step]}"
        return (
            f"no checkpoint in {str(self.directory)!r}; start without resuming, or "
            "name the folder of an earlier run"
        )

    def _unreadable(self, step: int | None) -> str:
        return f"checkpoint of step {step} in {str(self.directory)!r} cannot be read"

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failed = self._failure()
        self._manager.close()
        if failed and error is None:
            raise failed


def _move_aside(folder: Path) -> None:
    """Renames a step's folder to `damaged-STEP`, or -2 and so on after that."""
    if not folder.exists():
        return
    aside = folder.with_name(f"damaged-{folder.name}")
    others = (aside.with_name(f"{aside.name}-{n}") for n in itertools.count(2))
    folder.rename(next(p for p in itertools.chain([aside], others) if not p.exists()))


def _shapes_by_path(tree: Any) -> dict[str, tuple[int, ...]]:
    return {
        path_name(path): tuple(leaf.shape)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
