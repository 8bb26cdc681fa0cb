"""A training step with embedding tables: theirs and the model's in one program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from meshpar.audit.subject import Subject
from meshpar.errors import InputError
from meshpar.tables.memory import TableMemory, predicted_memory
from meshpar.tables.placement import Placements, lane_notes
from meshpar.tables.portable import PortableTables, host_tables
from meshpar.tables.programs import TABLES, TableFunctions, rows_looked_up
from meshpar.tables.tables import EmbeddingTables, check_arrays, check_ids
from meshpar.train.batch_placement import BatchPlacement, batch_structs
from meshpar.train.refusals import check_logits
from meshpar.train.state import (
    TrainState,
    check_seed,
    check_state,
    checked_without_optimizer,
)
from meshpar.train.step import StepPrograms, TrainStep
from meshpar.train.step_functions import StepFunctions

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
        step: Of the model.
        tables: The tables.

    Attributes:
        dense: The model's own step.
        tables: The tables.
        layout: That of the model.
        mesh: That of the model.
        functions: What the step computes.
        state_shapes: `TrainState` of the shape and dtype of every array.
        shardings: `TrainState` of the sharding of every array.
    """

    def __init__(self, step: TrainStep, tables: EmbeddingTables) -> None:
        self.dense, self.tables = step, tables
        self.layout, self.mesh = step.layout, step.mesh
        # Local steps refuse an input that has a gradient (`inputs_refusal`).
        dense = cast(StepFunctions, step.functions)
        functions = TableFunctions(dense=dense, tables=tables)
        self.functions = functions
        # A placement that cannot be is refused here.
        self.state_shapes, self.shardings = functions.state_shapes, functions.shardings
        self._batches = BatchPlacement(
            inputs=tables.batch_inputs(step.model.known_inputs),
            check_sequences=lambda batch, partly: None,
            layout=step.layout,
            sharding=step.batch_sharding,
        )
        self._programs = StepPrograms(
            functions=functions,
            reading=functions,
            batch_sharding=step.batch_sharding,
            split_space=None,
            compiler_options=step.compiler_options,
        )

    @property
    def placements(self) -> Placements:
        """Where every table lies, and every device's load; `print` it."""
        return self.tables.placements(self.mesh.size)

    def init(self, seed: int = 0) -> TrainState:
        """The first state, a function of `seed`; born in shards.

        A table's first values are the same under any layout and placement.

        Raises:
            InputError: `seed` is no whole number from 0 to 2**32 - 1.
        """
        check_seed(seed)
        with self._mesh_set():
            return self._programs.init(np.uint32(seed))

    def __call__(
        self, state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step of model and tables; `state` is donated and cannot be used again.

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
        with self._mesh_set():
            return self._programs.update(state, self.place(batch))

    def evaluate(self, state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Summed loss and weights of a batch, which `__call__` takes too."""
        state = checked_without_optimizer(state, self.state_shapes, self.mesh)
        with self._mesh_set():
            return self._programs.evaluate(state, self.place(batch))

    def logits(self, state: TrainState, batch: Batch) -> Any:
        """What the model's `logits` gives; the batch is whole, labels included."""
        check_logits(self.dense.model)
        state = checked_without_optimizer(state, self.state_shapes, self.mesh)
        with self._mesh_set():
            return self._programs.logits(state, self.place(batch, 1))

    def place(
        self,
        batch: Batch,
        microbatches: int | None = None,
        *,
        global_batch: int | None = None,
    ) -> dict[str, jax.Array]:
        """`TrainStep.place` of a batch, its ids checked.

        Raises:
            InputError: As for `__call__`.
        """
        check_ids(self.tables.tables, batch)
        check_arrays(self._batches.inputs, self.tables.outputs, batch)
        return self._batches.place(batch, microbatches, global_batch=global_batch)

    def rows_here(self, global_batch: int) -> np.ndarray:
        """`TrainStep.rows_here`."""
        return self._batches.rows_here(global_batch)

    def host_tables(self, state: TrainState) -> dict[str, dict[str, np.ndarray]]:
        """Table -> its `rows`, and its optimizer's state of each, whole on the host."""
        state = checked_without_optimizer(state, self.state_shapes, self.mesh)
        return host_tables(self.functions.stores, state.model_state[TABLES])

    def rows_looked_up(self, batch: Batch) -> np.ndarray:
        """Rows that each device looks up for a batch on the host, (devices,)."""
        check_ids(self.tables.tables, batch)
        return rows_looked_up(self.functions.stores, self.functions.shares, batch)

    def checkpoints(self, directory: Path, **options: Any) -> Checkpoints:
        """Checkpoints that any layout and placement of the same tables resumes.

        `save(step.portable(state), run)` writes one; `step.restored(checkpoints)` reads
        the newest, each in all processes alike.

        Args:
            directory: Where they lie.
            options: As of `meshpar.train.checkpoint.Checkpoints`.

        Raises:
            InputError: Several processes have the devices, whose number does not divide
                `meshpar.tables.blocks.BLOCK`.
        """
        from meshpar.train.checkpoint import Checkpoints  # Orbax, which takes a while

        self._portable.check_can_save()
        return Checkpoints(directory, layer_orders=self._portable.orders, **options)

    def portable(self, state: TrainState) -> TrainState:
        """The state with tables as no placement has them (`meshpar.tables.portable`).

        Raises:
            InputError: Several processes have the devices, whose number does not divide
                `meshpar.tables.blocks.BLOCK`.
        """
        check_state(state, self.state_shapes, self.mesh)
        return self._portable.taken_out(state)

    def restored(self, checkpoints: Checkpoints) -> TrainState:
        """The newest state of `checkpoints`, laid out for this step.

        Raises:
            InputError: There is none, or it is of another model or other tables.
        """
        to = self._portable
        state = checkpoints.restore(to.shapes, to.shardings, check=to.check_stored)
        return to.put_in(state)

    def compile(self, batch: Batch) -> jax.stages.Compiled:
        """The compiled step for a batch's shapes; arrays or `jax.ShapeDtypeStruct`s."""
        with self._mesh_set():
            shapes = self.state_shapes, batch_structs(batch)
            return self._programs.update.lower(*shapes).compile()

    def predicted_memory(self, batch: Batch) -> TableMemory:
        """Bytes of a device by arithmetic, nothing compiled (`meshpar.tables.memory`).

        Args:
            batch: Of the global batch; arrays or their shapes.
        """
        return predicted_memory(self.functions, batch)

    def audit_subject(self, *arguments: Any, platform: str | None = None) -> Subject:
        """What `meshpar.audit` compiles and explains; see there.

        Args:
            arguments: A batch, or a state and a batch; arrays or their shapes.
            platform: Kind of the absent devices, or None for the step's own.
        """
        step = self
        if platform is not None:
            step = TableStep(self.dense.for_absent(platform), self.tables)
        of_dense = step.dense.model.flat_parameters()
        return Subject(
            function=step.jitted(),
            arguments=(step.state_shapes, batch_structs(arguments[-1])),
            mesh=step.mesh,
            platform=step.dense.platform,
            weights={path: one.shape for path, one in of_dense.items()},
            layout=step.layout,
            compiler_options=step.dense.compiler_options,
            notes=lane_notes(step.functions.stores, step.dense.platform),
        )

    def jitted(self, compiler_options: Mapping[str, Any] | None = None) -> Any:
        """(state, batch) -> the next state and metrics; the state is donated."""
        options = dict(compiler_options or {})
        return replace(self._programs, compiler_options=options).update

    @cached_property
    def _portable(self) -> PortableTables:
        return PortableTables(functions=self.functions)

    def _mesh_set(self) -> Any:
        return jax.set_mesh(cast(Mesh, self.mesh))
