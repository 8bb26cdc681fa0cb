"""The sharded training step: one compiled program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.audit.subject import Subject
from meshpar.errors import InputError
from meshpar.hardware.compiler_options import compiler_options_for
from meshpar.layout import BATCH_AXES
from meshpar.mesh import hosts_of
from meshpar.parallel.pipeline.program import pipeline_of
from meshpar.parallel.pipeline.stages import in_layer_order
from meshpar.parallel.placement import DTYPES, Placement
from meshpar.parallel.prefetch_choice import prefetch_notes, prefetches
from meshpar.parallel.sequence_checks import check_context, check_per_token
from meshpar.parallel.sequence_lengths import check_sequences
from meshpar.parallel.space import check_space
from meshpar.train.audited_program import AuditedProgram
from meshpar.train.batch_placement import BatchPlacement, batch_structs
from meshpar.train.chosen_programs import chosen_programs
from meshpar.train.given_values import check_seed, placed_start
from meshpar.train.local_steps.functions import LocalStepFunctions
from meshpar.train.local_steps.metrics import of_replicas_here
from meshpar.train.local_steps.programs import SyncPrograms
from meshpar.train.local_steps.step_count import StepCount
from meshpar.train.local_steps.sync_notes import sync_notes
from meshpar.train.refusals import check_logits
from meshpar.train.state import TrainState, check_state, to_use
from meshpar.train.step_functions import Batch, Metrics
from meshpar.train.step_options import StepOptions


class TrainStep:
    """A compiled training step; make it with `make_train_step`.

    Attributes:
        options: What it was made of.
        layout: What it lays out, its -1 resolved.
        rules: Logical axis -> mesh axes.
        mesh: The devices, or none of them (`absent_mesh`).
        platform: Their kind: `cpu`, `gpu` or `tpu`.
        compiler_options: XLA's, of every program of the step.
        model: The model, arranged for its stages; `model_as_given` as it was.
        placement: Where every parameter, gradient and state lies.
        shardings: `TrainState` of the sharding of every array.
        schedule: What every rank of the pipeline does; None without microbatches.
        layers_of_stages: How many layers each stage has; None without microbatches.
        layer_orders: `TrainState` of where the layers of every array lie, for
            `Checkpoints`.
        functions: What the step computes, for programs that hold more than a model.
    """

    def __init__(self, options: StepOptions) -> None:
        self.options = options
        model, layout = options.model, options.layout
        check_space(model, layout, options.rules)
        check_context(model, layout, options.rules)
        check_per_token(model, layout)
        self.model_as_given, self.layout = model, layout
        self.rules, self.mesh = options.rules, options.mesh
        self.platform = options.platform
        self._devices_mesh = cast(Mesh, self.mesh)  # `jax.set_mesh` refuses any other
        pipeline = (
            pipeline_of(model, layout, options.schedule)
            if layout.runs_in_ticks
            else None
        )
        self.schedule = pipeline.schedule if pipeline else None
        self.layers_of_stages = pipeline.layers_of_stages if pipeline else None
        self.model = pipeline.model if pipeline else model
        placement = self.placement = Placement(
            model=self.model,
            layout=layout,
            rules=self.rules,
            mesh=self.mesh,
            platform=self.platform,
            gradient_dtype=DTYPES[options.gradient_dtype],
            hosts=hosts_of(self._devices_mesh)
            if options.gradient_reduction == "by_host"
            else None,
        )
        self._counted = StepCount()
        self.batch_sharding = NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))
        self._batches = BatchPlacement(
            inputs=self.model.inputs or {},
            check_sequences=partial(check_sequences, self.model, layout, self.rules),
            layout=layout,
            sharding=self.batch_sharding,
            sharding_of=placement.batch_sharding if placement.splits_space else None,
        )
        self.compiler_options = compiler_options_for(
            self.platform,
            options.compiler_options,
            prefetching=prefetches(placement),
            sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
        )
        self._programs = chosen_programs(
            options,
            placement,
            pipeline,
            batch_sharding=self.batch_sharding,
            compiler_options=self.compiler_options,
        )
        functions = self.functions = self._programs.functions
        self.state_shapes = functions.state_shapes
        self.layer_orders = functions.layer_orders
        self.shardings = functions.shardings

    def init(
        self,
        seed: int = 0,
        *,
        params: Mapping[str, Any] | None = None,
        model_state: Mapping[str, Any] | None = None,
    ) -> TrainState:
        """The first state, a function of `seed` and what is given; born in shards.

        Args:
            seed: What drawn values and all random numbers derive from.
            params: Nested dict of all parameters, layers first to last, in place of
                drawn ones: arrays, or what has a shape and NumPy's indexing, of which
                only the parts that this process's devices hold are read.
            model_state: The same of the model's state, or of a part of it; alone, the
                parameters are drawn.

        Raises:
            InputError: `seed` is no whole number from 0 to 2**32 - 1, or what is given
                is not of this model.
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
            return self._programs.init_from(
                np.uint32(seed),
                placed_start(self.model, self.shardings, params, model_state or {}),
            )

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step; `state` is donated and cannot be used again.

        With local steps (`sync_every`) it is one of each replica, and after the last of
        an interval the outer optimizer's.

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
            `weight_sum` and `skipped` sums (`meshpar.train.local_steps.metrics`).

        Raises:
            InputError: Shapes differ, the global batch does not divide over the batch
                axes, or the state is gone or another step's.
        """
        check_state(state, self.state_shapes, self._devices_mesh)
        with jax.set_mesh(self._devices_mesh):
            if not self.is_local:
                return self._programs.update(state, self.place(batch))
            done = self._counted.of(state) + 1
            state, metrics = self._programs.update(state, self.place(batch))
            if done % self.layout.sync_every == 0:
                state = self._sync_programs.sync(state)
            self._counted.note(state, done)
        return state, of_replicas_here(metrics)

    @property
    def is_local(self) -> bool:
        """Whether replicas train by themselves between averages (`sync_every`)."""
        return self.options.outer_optimizer is not None

    def sync(self, state: TrainState) -> TrainState:
        """The outer optimizer's step now, wherever in its interval the state is.

        Args:
            state: From `init` or a step; it is donated.

        Raises:
            InputError: The layout has no local steps, or the state is gone.
        """
        if not self.is_local:
            raise InputError(
                f"layout {str(self.layout)!r} has sync_every=1: there are no replicas "
                "to average; set it to 2 or more",
                key="step.no_replicas_to_average",
            )
        check_state(state, self.state_shapes, self._devices_mesh)
        with jax.set_mesh(self._devices_mesh):
            return self._sync_programs.sync(state)

    def parameters(self, state: TrainState) -> Any:
        """The parameters: the state's, or those that its replicas last had in common.

        Laid out as between steps, in the model's shapes (`in_layer_order`).
        """
        return self._to_use(state).params

    def loss_and_gradients(
        self, state: TrainState, batch: Batch
    ) -> tuple[jax.Array, Any]:
        """The loss of a batch and its gradients, in the step's `gradient_dtype`.

        What a step would apply, before any scaling, laid out as the optimizer's state:
        for research code, and for comparing layouts. As in `evaluate` and `logits`
        the parameters are `parameters(state)`.

        Args:
            state: From `init` or a step; it is not donated.
            batch: As `__call__` takes it.

        Raises:
            InputError: As for `__call__`.
        """
        with jax.set_mesh(self._devices_mesh):
            loss, _, gradients = self._programs.gradients(
                self._to_use(state), self.place(batch)
            )
        return loss, gradients

    def in_layer_order(self, tree: Any) -> Any:
        """Parameters or gradients whole on the host, their layers first to last.

        Under `stage` > 1 arrays hold the layers rank by rank, with places left empty
        where stages are of uneven size; here they have the model's own shapes.

        Args:
            tree: Arrays of the parameters' shapes: `state.params`, gradients, or a
                tree in the optimizer's state if it has those shapes (Adam's moments;
                not Adafactor's factors).
        """
        return in_layer_order(self.model, tree)

    def evaluate(self, state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Summed loss and weights of a batch, without dropout and auxiliary losses.

        Args:
            state: From `init` or a step; it is not donated.
            batch: As `__call__` takes it.

        Raises:
            InputError: As for `__call__`.
        """
        with jax.set_mesh(self._devices_mesh):
            return self._programs.evaluate(self._to_use(state), self.place(batch))

    def logits(self, state: TrainState, batch: Batch | jax.typing.ArrayLike) -> Any:
        """What the model's `logits` gives, such as fp32 (batch, seq, vocab).

        Args:
            state: From `init` or a step.
            batch: The arrays that it reads, or the only one: tokens (batch, seq).

        Raises:
            InputError: The model has no `logits`.
        """
        check_logits(self.model)
        if not isinstance(batch, Mapping):
            batch = {next(iter(self.model.known_inputs), ""): batch}
        with jax.set_mesh(self._devices_mesh):
            placed = self._batches.place(batch, 1, partly=True)
            return self._programs.logits(self._to_use(state), placed)

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """The lowered step for a batch's shapes; arrays or `jax.ShapeDtypeStruct`s."""
        with jax.set_mesh(self._devices_mesh):
            return self._programs.update.lower(*self._argument_shapes(batch))

    def compile(self, batch: Batch) -> jax.stages.Compiled:
        """The compiled step for a batch's shapes; arrays or `jax.ShapeDtypeStruct`s."""
        with jax.set_mesh(self._devices_mesh):
            return self.lower(batch).compile()

    def for_absent(self, platform: str) -> TrainStep:
        """The same step for absent devices of another platform."""
        schedule = self.schedule if self.layout.stage > 1 else None
        return TrainStep(
            replace(self.options.without_devices(platform), schedule=schedule)
        )

    @property
    def gradient_program(self) -> AuditedProgram:
        """Loss and gradients alone, for `meshpar.audit`.

        Gradients are what the program returns, so that they are no temporary memory.
        """
        return AuditedProgram(partial(self.audit_subject, gradients_only=True))

    @property
    def sync_program(self) -> AuditedProgram:
        """The average of local steps and the outer optimizer, for `meshpar.audit`.

        Auditing it raises InputError where the step has no local steps.
        """
        return AuditedProgram(partial(self.audit_subject, sync_only=True))

    def audit_subject(
        self,
        *arguments: Any,
        platform: str | None = None,
        gradients_only: bool = False,
        sync_only: bool = False,
    ) -> Subject:
        """What `meshpar.audit` compiles and explains; see there.

        Args:
            arguments: A batch, or a state and a batch; arrays or their shapes.
            platform: Kind of the absent devices, or None for the step's own.
            gradients_only: Without the optimizer (`gradient_program`).
            sync_only: What ends an interval of local steps (`sync_program`).

        Raises:
            InputError: `sync_only` of a step without local steps.
        """
        if sync_only and not self.is_local:
            raise InputError(
                f"layout {str(self.layout)!r} has sync_every=1 and averages nothing "
                "but gradients; set it to 2 or more",
                key="step.no_replicas_to_average",
            )
        step = self if platform is None else self.for_absent(platform)
        # JAX does not trace a jit with options of its own inside another.
        programs = replace(step._programs, compiler_options={})
        state, batch = step._argument_shapes(arguments[-1])
        given: tuple[Any, ...] = (state, batch)
        function = programs.update
        if gradients_only:
            function, given = programs.gradients, (programs.shapes_to_use, batch)
        notes = prefetch_notes(step.placement)
        if sync_only:
            averages = replace(step._sync_programs, compiler_options={})
            function, given = averages.sync, (state,)
        elif self.is_local and not gradients_only:
            notes += sync_notes(step._sync_programs.functions, self.layout)
        return Subject(
            function=function,
            arguments=given,
            mesh=step.mesh,
            platform=step.platform,
            weights={
                path: parameter.shape
                for path, parameter in self.model.flat_parameters().items()
            },
            layout=self.layout,
            compiler_options=step.compiler_options,
            notes=notes,
            sequence_axes=self.rules.mesh_axes("residual_seq")
            if "residual_seq" in self.rules.table
            else (),
        )

    def place(
        self,
        batch: Batch,
        *,
        microbatches: int | None = None,
        global_batch: int | None = None,
    ) -> dict[str, jax.Array]:
        """The batch on the devices, split over the batch axes.

        Args:
            batch: As `__call__` takes it; of several processes each gives its rows.
            microbatches: Parts that it is cut into; the layout's when absent.
            global_batch: Rows of all processes together, so that those of this one are
                counted.

        Raises:
            InputError: As for `__call__`, or this process has other rows than its
                devices hold.
        """
        return self._batches.place(batch, microbatches, global_batch=global_batch)

    def rows_here(self, global_batch: int) -> np.ndarray:
        """Which rows of a global batch this process gives: all, where it is alone.

        Raises:
            InputError: The global batch does not divide over the batch axes.
        """
        return self._batches.rows_here(global_batch)

    def check_batch(
        self, num_examples: int, name: str = "", microbatches: int | None = None
    ) -> None:
        """Refuses a global batch that does not divide over the batch axes.

        Raises:
            InputError: It does not; both numbers are in the message.
        """
        self._batches.check_examples(num_examples, name, microbatches)

    @cached_property
    def _sync_programs(self) -> SyncPrograms:
        """Of local steps."""
        return SyncPrograms(
            functions=cast(LocalStepFunctions, self.functions),
            compiler_options=self.compiler_options,
        )

    def _to_use(self, state: TrainState) -> TrainState:
        """What the programs that update nothing take."""
        if not self.is_local:
            return to_use(state, self.state_shapes, self._devices_mesh)
        check_state(state, self.state_shapes, self._devices_mesh)
        with jax.set_mesh(self._devices_mesh):
            return self._sync_programs.agreed(state)

    def _argument_shapes(self, batch: Batch) -> tuple[TrainState, Batch]:
        self._batches.check(batch)
        return self.state_shapes, batch_structs(batch)
