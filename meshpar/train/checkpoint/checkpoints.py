"""Checkpoints (Orbax) that any other layout can resume."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from meshpar.distributed import Processes
from meshpar.errors import local_path, note_beside
from meshpar.hardware.platforms import platform_named
from meshpar.train.checkpoint.choice import (
    CheckpointError,
    Choice,
    error_reason,
    explained,
)
from meshpar.train.checkpoint.files import read_run, remove_parts
from meshpar.train.checkpoint.saving import Saving
from meshpar.train.checkpoint.stored_arrays import (
    handler,
    read,
    save_args,
    shapes_by_path,
)
from meshpar.train.layer_order import (
    LayerOrder,
    arranged_within,
    copied,
    in_model_order,
    model_order_structs,
)
from meshpar.train.state import TrainState, portable, unported

LOGGER = logging.getLogger("meshpar.checkpoint")


class Checkpoints:
    """The checkpoints of one run, the newest few kept.

    One appears whole or not at all, with checksums of its files. Where the newest is
    damaged, the one before it is read, and `damaged` and a warning say so.

    Arrays are stored by their global index with layers first to last, and parameters
    once, as the master copy where there is one. So a run resumes on any layout of the
    same model, its stages and its `param_dtype` included: values that the layout stores
    in fewer bits are rounded to nearest.

    Args:
        directory: Their folder; made when absent.
        keep: Number of checkpoints to keep.
        keep_every: Keep each whose step divides by it, too.
        processes: Processes of this run, which share the checks.
        layer_orders: Order of the layers of every array, `TrainStep.layer_orders`;
            first to last when absent.

    Attributes:
        directory: Their folder.
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
        self.directory = local_path("checkpoints", directory).absolute()
        self._processes = processes or Processes()
        self._saving: Saving | None = None
        self._failed: CheckpointError | None = None
        self._writer, self._is_open = ThreadPoolExecutor(max_workers=1), True
        self._has_saved = False
        self._layer_orders = layer_orders
        self._manager = _manager(self.directory, directory, options)
        self._choice = Choice(self._manager, self.directory, self._processes)

    @property
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, once a save has ended; None without any."""
        self._settle()
        return self._manager.latest_step()

    @property
    def step_read(self) -> int | None:
        """Step of the checkpoint that `run_of_latest` or `restore` has read."""
        return self._choice.step

    @property
    def damaged(self) -> dict[int, str]:
        """Step -> damage of the checkpoints that were passed over."""
        return self._choice.damaged

    def save(
        self, state: TrainState, run: dict[str, Any], *, wait: bool = True
    ) -> None:
        """Write a state and a description of its run as one checkpoint.

        Args:
            state: The state.
            run: Plain JSON values: layout line, seed and so on.
            wait: Until it is written; else only until the state may be given to a step.
                A later error is then raised by the next `save` or `finish`.

        Raises:
            CheckpointError: It could not be written, for example on a full disk, or,
                unless it waits, the one before it could not: of that a save that waits
                only warns. Those that are there already stay.
        """
        earlier, self._choice.step = self._failure(), None
        if not self._is_open:
            where = repr(str(self.directory))
            raise CheckpointError(
                f"{where} is closed: save before its `with` ends",
                key="checkpoint.closed",
            )
        step = int(state.step)
        try:
            self.refuse_links()
            self._choice.move_damaged_aside()
            if step != self.latest_step:
                self._begin(step, state, run, wait)
                LOGGER.info("checkpoint of step %d: saving in %s", step, self.directory)
        except BaseException:
            self._failed = earlier  # Which is not to be lost beside it.
            raise
        if earlier and not wait:
            raise earlier
        if earlier:
            warnings.warn(str(earlier), stacklevel=2)
        if wait:
            self.finish()

    def refuse_links(self) -> None:
        """Raise if a checkpoint in the folder is a symbolic link.

        Raises:
            CheckpointError: Names the first link and its target.
        """
        if not self.directory.is_dir():
            return
        for path in sorted(self.directory.iterdir()):
            if path.name.isdecimal() and path.is_symlink():
                raise CheckpointError(
                    f"checkpoint {path.name} in {str(self.directory)!r} is a link to "
                    f"{str(path.readlink())!r}; this run would have to delete it later "
                    "and does not delete files outside its folder; replace the link by "
                    "a copy, or start a new run from it",
                    key="checkpoint.is_link",
                )

    def forget_after(self, step: int) -> None:
        """Delete the checkpoints of later steps, which are trained again.

        Raises:
            CheckpointError: What was being saved could not be written.
        """
        self.finish()
        for later in self._manager.all_steps():
            if later > step:
                self._manager.delete(later)

    def finish(self) -> None:
        """Wait until a save has ended.

        Raises:
            CheckpointError: It could not be.
        """
        failed = self._failure()
        if failed:
            raise failed

    def newest_good(self, at_most: int | None = None) -> int | None:
        """Return the step of the newest checkpoint without damage, to be read next.

        Every file is read once and compared with its checksum. None if there is no
        checkpoint, or only damaged ones: reading says what is wrong.

        Args:
            at_most: Only up to this step.
        """
        self._settle()
        return self._choice.newest_good(at_most)

    def run_of_latest(self) -> dict[str, Any]:
        """Return the description of the run at the newest checkpoint.

        Raises:
            CheckpointError: There is none, or it cannot be read.
        """
        self._settle()
        return self._choice.read(read_run)

    def restore(
        self,
        shapes: TrainState,
        shardings: TrainState,
        *,
        check: Callable[[Path], None] | None = None,
    ) -> TrainState:
        """Return the newest state under `shardings`, whatever layout wrote it.

        Args:
            shapes: `jax.ShapeDtypeStruct` of every array.
            shardings: The sharding of every array.
            check: Called with the folder of the state before shapes are compared, for
                refusals that shapes would not explain.

        Raises:
            CheckpointError: There is none, it cannot be read, or it is of another
                model: a global shape differs.
        """
        self._settle()
        LOGGER.info("checkpoint: restoring from %s", self.directory)
        orders = portable(self._orders_beside(shapes))
        to = portable(shapes), portable(shardings)
        in_order = model_order_structs(*to, orders)
        structs = jax.tree.map(
            lambda order, lying, stored: stored if order.dim else lying,
            orders,
            jax.tree.map(
                lambda shape, sharding: jax.ShapeDtypeStruct(
                    shape.shape, shape.dtype, sharding=sharding
                ),
                *to,
            ),
            in_order,
        )
        places = jax.tree.map(lambda one: None if one.dim else one.places, orders)
        state = self._choice.read(
            lambda folder: read(folder / "state", structs, places),
            check=lambda step: self._check(step, in_order, check),
        )
        state = arranged_within(state, orders, to[1])
        with explained(self.directory, self._choice.unreadable(self.step_read)):
            return unported(state, shapes, shardings)

    def _orders_beside(self, state: TrainState) -> TrainState:
        if self._layer_orders is None:
            return jax.tree.map(lambda _: LayerOrder(), state)
        return self._layer_orders

    def _begin(
        self, step: int, state: TrainState, run: dict[str, Any], wait: bool
    ) -> None:
        """Start to save; `_failure` tells errors."""
        if self._processes.is_first and not self._has_saved:
            remove_parts(self.directory)  # Of runs that were killed while they saved.
        self._has_saved = True
        orders = portable(self._orders_beside(state))
        stored = in_model_order(portable(state), orders)
        # What lies in a host's memory Orbax does not copy, but holds until it is
        # written: a step could not take that memory, and new memory costs it more.
        devices = state.step.devices()
        on_host = all(platform_named(device.platform).is_host for device in devices)
        if on_host and not wait:
            stored = copied(stored, orders)
        args = ocp.args.Composite(state=save_args(stored), run=ocp.args.JsonSave(run))
        saving = Saving(self._manager, self.directory, step, self._processes)
        saving.begin(args, self._writer)
        self._saving = saving
        # Orbax of several processes may begin with collectives, which have an order.
        if not on_host or self._processes.num_processes > 1:
            saving.wait_until_begun()

    def _failure(self) -> CheckpointError | None:
        """Wait for a save, and return its error, once."""
        self._settle()
        failed, self._failed = self._failed, None
        return failed

    def _settle(self) -> None:
        """Wait for a save; `_failure` tells its error."""
        saving = self._saving
        error = saving.end() if saving else None
        self._saving = None  # Not before: Ctrl-C may end the wait.
        if saving is None or error is None:
            return
        with contextlib.suppress(OSError):
            if self._processes.is_first:
                remove_parts(self.directory)
            self._manager.reload()  # It has forgotten those that are there.
        where = repr(str(self.directory))
        what = f"checkpoint of step {saving.step} not written to {where}"
        self._failed = CheckpointError(
            f"{what}: {error_reason(error, self.directory)}",
            key="checkpoint.not_written",
        )
        self._failed.__cause__ = error

    def _check(
        self, step: int, wanted: TrainState, first: Callable[[Path], None] | None
    ) -> None:
        there = self._stored_shapes(step)
        if first is not None and there:
            first(self.directory / str(step) / "state")
        for path, here in shapes_by_path(wanted).items():
            if path == "skipped" and there.get(path, here) != here:
                had, has = (shape[0] if shape else 1 for shape in (there[path], here))
                raise CheckpointError(
                    f"checkpoint of step {step} in {str(self.directory)!r} has "
                    f"the states of {had} replicas, but the layout has {has}: each has "
                    "an optimizer state of its own; keep 'data' and whether there are "
                    "local steps (sync_every above 1)",
                    key="checkpoint.other_replicas",
                )
            if there.get(path, here) != here:
                raise CheckpointError(
                    f"checkpoint of step {step} in {str(self.directory)!r} is of "
                    f"another model: {path} has shape {there[path]} there and {here} "
                    "here; build the model with the sizes it was saved with, or start "
                    "without resuming",
                    key="checkpoint.other_model",
                )

    def _stored_shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """Return shapes by path; none if they cannot be read, which reading reports."""
        try:
            metadata = self._manager.item_metadata(step)["state"]
            return shapes_by_path(getattr(metadata, "tree", metadata))
        except Exception:  # Orbax raises kinds of its own, and has None for absent.
            return {}

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        failed, self._is_open = self._failure(), False
        try:
            with self._writer:  # Which Orbax has told of every save that failed.
                self._writer.submit(self._manager.close).result()
        finally:
            if failed and error is None:
                raise failed
            if error is not None and failed:  # A warning could replace that error.
                note_beside(error, failed)


def _manager(
    folder: Path, named: Path, options: ocp.CheckpointManagerOptions
) -> ocp.CheckpointManager:
    """Return Orbax's manager of a folder, which is made when absent.

    Args:
        folder: The folder, absolute.
        named: The folder as the user named it, for errors.
        options: Which checkpoints to keep.

    Raises:
        CheckpointError: The folder cannot be made, or its checkpoints be listed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Handlers are named here, so that the shapes in a checkpoint can be asked for.
        handlers = {"state": handler(), "run": ocp.JsonCheckpointHandler()}
        return ocp.CheckpointManager(folder, options=options, item_handlers=handlers)
    except OSError as error:
        raise CheckpointError(
            f"cannot make the checkpoint folder {str(named)!r}: {error.strerror}",
            key="checkpoint.folder_not_made",
        ) from error
    except Exception as error:  # Of files that Orbax reads here, and has not written.
        raise CheckpointError(
            f"the checkpoints in {str(named)!r} cannot be listed: "
            f"{error_reason(error, folder)}; move the one away whose "
            "_CHECKPOINT_METADATA was changed",
            key="checkpoint.unreadable",
        ) from error
