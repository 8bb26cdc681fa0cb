"""A training step with embedding tables: theirs and the model's in one program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from meshpar.audit.subject import Subject
from meshpar.errors import InputError
from meshpar.tables.memory import TableMemory, predicted_memory
from meshpar.tables.placement import Placements
from meshpar.tables.portable import PortableTables, host_tables
from meshpar.tables.programs import TABLES, TableFunctions, rows_looked_up
from meshpar.tables.stores import lane_notes
from meshpar.tables.tables import EmbeddingTables, check_arrays, check_ids
from meshpar.train.refusals import check_logits
from meshpar.train.state import TrainState, check_state, checked_without_optimizer
from meshpar.train.step import TrainStep
from meshpar.train.step_functions import Evaluation, StepFunctions

if TYPE_CHECKING:
    from meshpar.train.checkpoint import Checkpoints

Batch = Mapping[str, Any]


def with_tables(step: TrainStep, tables: EmbeddingTables) -> TableStep:
    """Return the training step of a model whose inputs are looked up in tables.

    One compiled program looks rows up by all-to-all, runs the model's forward and
    backward under its layout, stages included, sends the rows' gradients back and
    updates the touched rows in place. Nothing of the size of a table moves, or is
    allocated. `max_grad_norm` and `grad_norm` are of the model's own parameters.

    Args:
        step: Step of a model that declares each input that is looked up, with a
            gradient.
        tables: The tables, from `embedding_tables`.

    Raises:
        InputError: The model does not take what is looked up, a placement does not
            fit, or `step` or `tables` is of another type.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> from meshpar import embedding_tables, make_train_step
        >>> from meshpar.models.presets import build
        >>> from meshpar.tables import SGD, Table, with_tables
        >>> tables = embedding_tables(
        ...     [Table(name=f"id{at}", rows=100, dim=16) for at in range(2)], SGD(0.1))
        >>> model = build("tiny-dlrm", features=2)
        >>> dense = make_train_step(model, optax.adam(1e-3), "data=-1")
        >>> step = with_tables(dense, tables)
        >>> batch = {f"id{at}": np.zeros((8, 1), np.int32) for at in range(2)}
        >>> batch |= {"numbers": np.ones((8, 4)), "clicks": np.ones(8)}
        >>> state, metrics = step(step.init(0), batch)
    """
    if not isinstance(step, TrainStep):
        raise InputError(
            f"with_tables was given a {type(step).__name__}; give what make_train_step "
            "returned, and all tables at once",
            key="tables.not_train_step",
        )
    if not isinstance(tables, EmbeddingTables):
        raise InputError(
            f"with_tables was given a {type(tables).__name__}; give what "
            "embedding_tables returned",
            key="tables.not_embedding_tables",
        )
    tables.check_model(step.model.known_inputs)
    return TableStep(step, tables)


class TableStep:
    """A training step with tables; see `with_tables`.

    Its state is a `TrainState` whose `model_state` holds the tables too.

    Args:
        step: Step of the model.
        tables: The tables.

    Attributes:
        dense: The model's own step.
        tables: The tables.
        layout: Layout of the model.
        mesh: Mesh of the model.
        functions: Functions of the step.
        state_shapes: `TrainState` of the shape and dtype of every array.
        shardings: `TrainState` of the sharding of every array.
    """

    def __init__(self, step: TrainStep, tables: EmbeddingTables) -> None:
        self.dense, self.tables = step, tables
        self.layout, self.mesh = step.layout, step.mesh
        # Local steps refuse an input that has a gradient (`inputs_refusal`).
        dense = cast(StepFunctions, step.functions)
        self.functions = TableFunctions(dense=dense, tables=tables)
        self._inputs = tables.batch_inputs(step.model.known_inputs)
        # This refuses a placement that does not fit.
        self._step = step.with_functions(self.functions, self._inputs)
        self.state_shapes = self._step.state_shapes
        self.shardings = self._step.shardings

    @property
    def placements(self) -> Placements:
        """Placement of every table, and load of every device; `print` it."""
        return self.tables.placements(self.mesh.size)

    def init(self, seed: int = 0) -> TrainState:
        """Return the first state, a function of `seed`, made in shards.

        A table's first values are the same under any layout and placement.

        Raises:
            InputError: `seed` is no whole number from 0 to 2**32 - 1.
        """
        return self._step.init(seed)

    def __call__(
        self, state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take one step of model and tables; `state` is donated, and gone afterwards.

        Args:
            state: From `init` or an earlier step.
            batch: The model's arrays, and each feature's ids, (examples, bag); of
                several processes each gives its own rows.

        Returns:
            The new state, and scalars as a `TrainStep` returns.

        Raises:
            InputError: Shapes differ, an id is outside of its table, an array is not
                declared, the global batch does not divide over the batch axes, or the
                state is gone or another step's.
        """
        check_state(state, self.state_shapes, self.mesh)
        return self._step(state, self.place(batch))

    def evaluate(self, state: TrainState, batch: Batch) -> Evaluation:
        """Return the metrics of a batch by name, as `TrainStep.evaluate` does."""
        check_state(state, self.state_shapes, self.mesh)
        return self._step.evaluate(state, self.place(batch))

    def logits(self, state: TrainState, batch: Batch) -> Any:
        """Return the model's `logits`; the batch is whole, labels included."""
        check_logits(self.dense.model)
        check_state(state, self.state_shapes, self.mesh)
        return self._step.logits(state, self.place(batch, 1))

    def place(
        self,
        batch: Batch,
        microbatches: int | None = None,
        *,
        global_batch: int | None = None,
    ) -> dict[str, jax.Array]:
        """Put a batch on the devices, its ids checked; see `TrainStep.place`.

        Raises:
            InputError: As for `__call__`.
        """
        check_ids(self.tables.tables, batch)
        check_arrays(self._inputs, self.tables.outputs, batch)
        return self._step.place(
            batch, microbatches=microbatches, global_batch=global_batch
        )

    def rows_here(self, global_batch: int) -> np.ndarray:
        """Return the rows of this process; see `TrainStep.rows_here`."""
        return self._step.rows_here(global_batch)

    def host_tables(self, state: TrainState) -> dict[str, dict[str, np.ndarray]]:
        """Return table -> its `rows` and their optimizer state, whole on the host."""
        state = checked_without_optimizer(state, self.state_shapes, self.mesh)
        return host_tables(self.functions.stores, state.model_state[TABLES])

    def rows_looked_up(self, batch: Batch) -> np.ndarray:
        """Return the rows that each device looks up for a host's batch, (devices,)."""
        check_ids(self.tables.tables, batch)
        return rows_looked_up(self.functions.stores, self.functions.shares, batch)

    def checkpoints(self, directory: Path, **options: Any) -> Checkpoints:
        """Checkpoints that any layout and placement of the same tables resumes.

        `save(step.portable(state), run)` writes one; `step.restored(checkpoints)` reads
        the newest, each in all processes alike.

        Args:
            directory: Folder of the checkpoints.
            options: Options of `meshpar.train.checkpoint.Checkpoints`.

        Raises:
            InputError: Several processes have the devices, whose number does not divide
                `meshpar.tables.portable.BLOCK`.
        """
        from meshpar.train.checkpoint import Checkpoints  # Orbax, which takes a while

        self._portable.check_can_save()
        return Checkpoints(directory, layer_orders=self._portable.orders, **options)

    def portable(self, state: TrainState) -> TrainState:
        """Return the state with tables without placement (`meshpar.tables.portable`).

        Raises:
            InputError: Several processes have the devices, whose number does not divide
                `meshpar.tables.portable.BLOCK`.
        """
        check_state(state, self.state_shapes, self.mesh)
        return self._portable.taken_out(state)

    def restored(self, checkpoints: Checkpoints) -> TrainState:
        """Return the newest state of `checkpoints`, laid out for this step.

        Raises:
            InputError: There is none, or it is of another model or other tables.
        """
        portable = self._portable
        state = checkpoints.restore(
            portable.shapes, portable.shardings, check=portable.check_stored
        )
        return portable.put_in(state)

    def compile(self, batch: Batch) -> jax.stages.Compiled:
        """Compile the step for a batch's shapes; arrays or `jax.ShapeDtypeStruct`s."""
        return self._step.compile(batch)

    def predicted_memory(self, batch: Batch) -> TableMemory:
        """Return bytes of a device by arithmetic, without compiling anything.

        Args:
            batch: The global batch; arrays or their shapes.
        """
        return predicted_memory(self.functions, batch)

    def audit_subject(
        self,
        *arguments: Any,
        platform: str | None = None,
        devices_per_host: int | None = None,
    ) -> Subject:
        """Return the subject of `meshpar.audit`; see there.

        Args:
            arguments: A batch, or a state and a batch; arrays or their shapes.
            platform: Kind of the absent devices, or None for the step's own.
            devices_per_host: Absent devices of a host; None if unknown.
        """
        step = self
        if platform is not None:
            step = TableStep(
                self.dense.for_absent(platform, devices_per_host), self.tables
            )
        notes = lane_notes(step.functions.stores, step.dense.platform)
        return replace(step._step.audit_subject(*arguments), notes=notes)

    @cached_property
    def _portable(self) -> PortableTables:
        return PortableTables(functions=self.functions)
