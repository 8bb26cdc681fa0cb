"""The sharded training step, and its path from a batch to an update.

`make_step.make_train_step` checks its arguments and makes a `TrainStep` of them. One
step, `step(state, batch)`, then goes through these files:

1. Here the state is checked, and `batch_placement` checks the batch and puts its rows
   on the devices.
2. `step_programs` has the plan of the step and its compiled program, which runs.
3. `step_functions` has what the program was traced from: `update` takes loss and
   gradients from `meshpar.parallel` (`program`, or `pipeline.program` with stages),
   scales them, calls the optimizer, and stores the parameters as they lie at rest.
4. `state` has the arrays that come back. With local steps `local_steps` averages the
   replicas after the last step of an interval.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from meshpar.audit.subject import Subject
from meshpar.errors import InputError
from meshpar.parallel.pipeline.stages import in_layer_order
from meshpar.train.batch_placement import BatchPlacement, batch_structs, with_sharding
from meshpar.train.layer_order import placed_start
from meshpar.train.local_steps import StepCount
from meshpar.train.metrics import local_replica_metrics
from meshpar.train.refusals import check_logits
from meshpar.train.state import (
    TrainState,
    check_seed,
    check_state,
    checked_without_optimizer,
)
from meshpar.train.state_table import step_html
from meshpar.train.step_functions import Batch, Evaluation, Metrics
from meshpar.train.step_programs import AuditedProgram, StepOptions, StepPlan


class TrainStep:
    """A compiled training step; make it with `make_train_step`.

    Attributes:
        options: The options that it was made with.
        layout: The layout, its -1 resolved.
        rules: Logical axis -> mesh axes.
        mesh: The mesh, of devices or absent (`absent_mesh`).
        platform: `cpu`, `gpu` or `tpu`.
        compiler_options: XLA's options for every program of the step.
        model: The model, arranged for its stages; `model_as_given` as it was.
        placement: Specs of every parameter, gradient and state.
        state_shapes: `TrainState` of the shape and dtype of every array.
        shardings: `TrainState` of the sharding of every array.
        batch_sharding: Sharding of a batch's arrays over the batch axes.
        schedule: Actions of every rank of the pipeline; None without microbatches.
        layers_of_stages: Number of layers of each stage; None without microbatches.
        functions: The functions that its programs compute.
    """

    def __init__(self, options: StepOptions) -> None:
        plan = self._plan = StepPlan(options)
        pipeline = plan.pipeline
        self.options, self.model_as_given = options, options.model
        self.layout, self.rules = options.layout, options.rules
        self.mesh, self.platform = options.mesh, options.platform
        self.schedule = pipeline.schedule if pipeline else None
        self.layers_of_stages = pipeline.stage_layers if pipeline else None
        self.model, self.placement = plan.model, plan.placement
        self.batch_sharding = plan.batches.sharding
        self.compiler_options = plan.compiler_options
        self.functions = plan.functions
        self.state_shapes = plan.functions.state_shapes
        self.shardings = plan.functions.shardings
        self._batches, self._programs = plan.batches, plan.programs
        self._devices_mesh = cast(Mesh, self.mesh)  # `jax.set_mesh` refuses any other

    _repr_html_ = step_html

    def with_functions(self, functions: Any, inputs: Mapping[str, Any]) -> TrainStep:
        """Return a step of other functions on this step's mesh, such as with tables.

        Args:
            functions: `initial_state`, `update`, `evaluated` and `logits`, which may
                call those of this step's `functions`; `state_shapes` and `shardings`
                of their state. Local steps refuse them.
            inputs: Arrays of a batch, `meshpar.Input` by name.
        """
        step = copy.copy(self)
        step.functions = functions
        step.state_shapes, step.shardings = functions.state_shapes, functions.shardings
        step._batches = BatchPlacement(
            inputs=inputs,
            check_sequences=None,
            layout=self.layout,
            sharding=self.batch_sharding,
        )
        step._programs = replace(
            self._programs, functions=functions, reading=functions, split_space=None
        )
        return step

    @cached_property
    def layer_orders(self) -> TrainState:
        """Where the layers of every array of the state are, for `Checkpoints`."""
        return self.functions.layer_orders

    def whole_states(self) -> list[tuple[str, int]]:
        """Return path and bytes of large optimizer state that no device shares.

        State of parameters that the layout splits, above 1 MiB, whose dims are not its
        parameter's (`state_spec` of `make_train_step`).
        """
        return list(self._programs.reading.whole_states())

    def init(
        self,
        seed: int = 0,
        *,
        params: Mapping[str, Any] | None = None,
        model_state: Mapping[str, Any] | None = None,
    ) -> TrainState:
        """Return the first state, by `seed` and given values, made in shards.

        Args:
            seed: Seed of drawn values and of all random numbers.
            params: Nested dict of all parameters, layers first to last, in place of
                drawn ones: arrays, or objects with a shape and NumPy's indexing, of
                which only the parts that this process's devices hold are read.
            model_state: The same for the model's state, or a part of it; alone, the
                parameters are drawn.

        Raises:
            InputError: `seed` is no whole number from 0 to 2**32 - 1, or given values
                are not of this model.
        """
        check_seed(seed)
        given = params is not None or bool(model_state)
        if given and self.is_local:
            raise InputError(
                f"given values with sync_every={self.layout.sync_every}: replicas of "
                "local steps start from drawn values only; train without local steps "
                "first, or resume such a run",
                key="step.given_values_with_local_steps",
            )
        with jax.set_mesh(self._devices_mesh):
            if not given:
                return self._programs.init(np.uint32(seed))
            start = placed_start(self.model, self.shardings, params, model_state or {})
            return self._programs.init_from(np.uint32(seed), start)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run one optimizer step; `state` is donated and cannot be used again.

        With local steps (`sync_every`) each replica takes one, and after the last of an
        interval the outer optimizer takes its own.

        Args:
            state: From `init` or an earlier step.
            batch: The arrays that the model declares or reads, by name, each with the
                example first; of several processes each gives its own rows.

        Returns:
            The new state, and scalars that every process can read. These are `loss` and
            `grad_norm` (before any scaling) of the old parameters, `weight_sum`, the
            mean of each auxiliary loss before its coefficient (`auxiliary.NAME`), and
            `skipped`, the steps so far that changed nothing, as their gradients were
            not finite or all weights 0. With local steps they are means over the
            replicas that this process holds devices of, weighted as in one batch, and
            `weight_sum` and `skipped` sums (`meshpar.train.metrics`).

        Raises:
            InputError: Shapes differ, the global batch does not divide over the batch
                axes, or the state is gone or another step's.
        """
        check_state(state, self.state_shapes, self._devices_mesh)
        with jax.set_mesh(self._devices_mesh):
            if not self.is_local:
                return self._programs.update(state, self.place(batch))
            done = self._step_count.steps(state) + 1
            state, metrics = self._programs.update(state, self.place(batch))
            if done % self.layout.sync_every == 0:
                state = self._plan.sync_programs.sync(state)
            self._step_count.note(state, done)
        return state, local_replica_metrics(metrics)

    @property
    def is_local(self) -> bool:
        """True if replicas train by themselves between averages (`sync_every`)."""
        return self.options.outer_optimizer is not None

    def sync(self, state: TrainState) -> TrainState:
        """Run the outer optimizer's step, wherever in its interval the state is.

        Args:
            state: From `init` or a step; it is donated.

        Raises:
            InputError: The layout has no local steps, or the state is gone.
        """
        self._check_local()
        check_state(state, self.state_shapes, self._devices_mesh)
        with jax.set_mesh(self._devices_mesh):
            return self._plan.sync_programs.sync(state)

    def parameters(self, state: TrainState) -> Any:
        """Return the parameters: the state's, or those its replicas last had in common.

        They are sharded as between steps (`in_layer_order` gives the model's shapes).
        """
        return self._reading_state(state).params

    def loss_and_gradients(
        self, state: TrainState, batch: Batch
    ) -> tuple[jax.Array, Any]:
        """Return the loss of a batch and its gradients, in the step's `gradient_dtype`.

        These are the gradients of a step before any scaling, sharded as optimizer
        state: for research code, and for comparing layouts. As in `evaluate` and
        `logits` the parameters are `parameters(state)`.

        Args:
            state: From `init` or a step; it is not donated.
            batch: As `__call__` takes it.

        Raises:
            InputError: As for `__call__`.
        """
        with jax.set_mesh(self._devices_mesh):
            loss, _, gradients = self._programs.gradients(
                self._reading_state(state), self.place(batch)
            )
        return loss, gradients

    def in_layer_order(self, tree: Any) -> Any:
        """Return parameters or gradients whole on the host, layers first to last.

        Under `stage` > 1 arrays hold the layers rank by rank, with places left empty
        where stages are of uneven size; here they have the model's own shapes.

        Args:
            tree: Arrays of the parameters' shapes: `state.params`, gradients, or a
                tree in the optimizer's state if it has those shapes (Adam's moments;
                not Adafactor's factors).
        """
        return in_layer_order(self.model, tree)

    def unflatten(self, state: TrainState) -> Any:
        """Return the parameters as the tree that `from_loss(init=)` makes, on the host.

        Raises:
            InputError: The model is not one of `from_loss`.
        """
        if self.model_as_given.unflatten is None:
            raise InputError(
                "the model is not one of from_loss, which keeps a user's own tree; "
                "take step.in_layer_order(state.params)",
                key="model.no_tree_of_its_own",
            )
        reading = self._reading_state(state)
        return self.model_as_given.unflatten(
            self.in_layer_order(reading.params),
            self.in_layer_order(reading.model_state),
        )

    def evaluate(self, state: TrainState, batch: Batch) -> Evaluation:
        """Return metrics of a batch by name, without dropout and auxiliary losses.

        These are `loss`, `loss_sum`, `weight_sum` and what the head names. Unpacked as
        (loss_sum, weight_sum), as in older programs, they warn.

        Args:
            state: From `init` or a step; it is not donated.
            batch: As `__call__` takes it.

        Raises:
            InputError: As for `__call__`.
        """
        with jax.set_mesh(self._devices_mesh):
            metrics = self._programs.evaluate(
                self._reading_state(state), self.place(batch)
            )
        return Evaluation(metrics)

    def logits(self, state: TrainState, batch: Batch | jax.typing.ArrayLike) -> Any:
        """Return the model's `logits`, such as fp32 (batch, seq, vocab).

        Args:
            state: From `init` or a step.
            batch: The arrays that it reads, or its only one: tokens (batch, seq).

        Raises:
            InputError: The model has no `logits`.
        """
        check_logits(self.model)
        if not isinstance(batch, Mapping):
            batch = {next(iter(self.model.known_inputs), ""): batch}
        with jax.set_mesh(self._devices_mesh):
            placed = self._batches.place(batch, 1, partly=True)
            return self._programs.logits(self._reading_state(state), placed)

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """Return the lowered step for a batch of arrays or `jax.ShapeDtypeStruct`s."""
        self._batches.check(batch)
        state, batch = self.state_shapes, batch_structs(batch)
        if isinstance(self.mesh, Mesh):
            # With shardings JAX knows it again as the program that a step runs.
            state = jax.tree.map(with_sharding, state, self.shardings)
            batch = self._batches.structs(batch)
        with jax.set_mesh(self._devices_mesh):
            return self._programs.update.lower(state, batch)

    def compile(self, batch: Batch) -> jax.stages.Compiled:
        """Return the compiled step for a batch of arrays or `jax.ShapeDtypeStruct`s.

        JAX keeps it: a step on such a batch compiles nothing.
        """
        with jax.set_mesh(self._devices_mesh):
            return self.lower(batch).compile()

    def for_absent(
        self, platform: str, devices_per_host: int | None = None
    ) -> TrainStep:
        """Return the same step for absent devices of another platform.

        Args:
            platform: Kind of the devices.
            devices_per_host: Devices of a host; None if unknown.
        """
        options = self.options.without_devices(platform, devices_per_host)
        schedule = self.schedule if self.layout.stage > 1 else None
        return TrainStep(replace(options, schedule=schedule))

    @property
    def gradient_program(self) -> AuditedProgram:
        """The program of loss and gradients alone, for `meshpar.audit`.

        It returns the gradients, so that they are no temporary memory.
        """
        return AuditedProgram(partial(self.audit_subject, gradients_only=True))

    @property
    def sync_program(self) -> AuditedProgram:
        """The program of local steps' average and outer optimizer, for `meshpar.audit`.

        Auditing it raises InputError where the step has no local steps.
        """
        return AuditedProgram(partial(self.audit_subject, sync_only=True))

    def audit_subject(
        self,
        *arguments: Any,
        platform: str | None = None,
        devices_per_host: int | None = None,
        gradients_only: bool = False,
        sync_only: bool = False,
    ) -> Subject:
        """Return the program that `meshpar.audit` compiles and explains.

        Args:
            arguments: A batch, or a state and a batch; arrays or their shapes.
            platform: Kind of the absent devices, or None for the step's own.
            devices_per_host: Absent devices of a host; None if unknown.
            gradients_only: Leave the optimizer out (`gradient_program`).
            sync_only: The end of an interval of local steps (`sync_program`).

        Raises:
            InputError: `sync_only` of a step without local steps.
        """
        if sync_only:
            self._check_local()
        step = self if platform is None else self.for_absent(platform, devices_per_host)
        step._batches.check(arguments[-1])
        function, given, notes = step._plan.audited_program(
            step._programs,
            batch_structs(arguments[-1]),
            gradients_only=gradients_only,
            sync_only=sync_only,
        )
        parameters = self.model.flat_parameters()
        return Subject(
            function=function,
            arguments=given,
            mesh=step.mesh,
            platform=step.platform,
            weights={path: one.shape for path, one in parameters.items()},
            layout=step.layout,
            compiler_options=step.compiler_options,
            notes=notes,
            sequence_axes=self.rules.table.get("residual_seq", ()),
        )

    def place(
        self,
        batch: Batch,
        *,
        microbatches: int | None = None,
        global_batch: int | None = None,
    ) -> dict[str, jax.Array]:
        """Put a batch on the devices, split over the batch axes.

        Args:
            batch: As `__call__` takes it; of several processes each gives its rows.
            microbatches: Number of parts that it is cut into; the layout's when absent.
            global_batch: Rows of all processes together, to check the number of this
                process's.

        Raises:
            InputError: As for `__call__`, or this process has more or fewer rows than
                its devices hold.
        """
        return self._batches.place(batch, microbatches, global_batch=global_batch)

    def rows_here(self, global_batch: int) -> np.ndarray:
        """Return the rows of a global batch that this process gives; alone, all.

        Raises:
            InputError: The global batch does not divide over the batch axes.
        """
        return self._batches.rows_here(global_batch)

    def check_batch(
        self, num_examples: int, name: str = "", microbatches: int | None = None
    ) -> None:
        """Refuse a global batch that does not divide over the batch axes.

        Raises:
            InputError: It does not; both numbers are in the message.
        """
        self._batches.check_examples(num_examples, name, microbatches)

    @cached_property
    def _step_count(self) -> StepCount:
        """Number of local steps of a state."""
        return StepCount()

    def _reading_state(self, state: TrainState) -> TrainState:
        """Return the state for programs that update nothing."""
        if not self.is_local:
            return checked_without_optimizer(
                state, self.state_shapes, self._devices_mesh
            )
        check_state(state, self.state_shapes, self._devices_mesh)
        with jax.set_mesh(self._devices_mesh):
            return self._plan.sync_programs.common_reading_state(state)

    def _check_local(self) -> None:
        if not self.is_local:
            raise InputError(
                f"layout {str(self.layout)!r} has sync_every=1: there are no replicas "
                "to average; set it to 2 or more",
                key="step.no_replicas_to_average",
            )
