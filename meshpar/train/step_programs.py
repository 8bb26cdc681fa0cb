"""From the options of a step to its programs, before anything is traced.

`StepOptions` holds the checked arguments of `make_train_step`. `StepPlan` derives from
them, each once and in this order: the stages and the model in their order, the
placement of every array, the functions (`step_functions`), and `StepPrograms`, which
are these functions under `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshpar.audit.hazards import PlainConvolutions, check_divergent
from meshpar.audit.subject import Subject
from meshpar.checks.sequence_probe import check_sequences
from meshpar.hardware.platforms import compiler_options_for
from meshpar.layout import BATCH_AXES, Layout
from meshpar.machine.mesh import absent_mesh, device_kinds, mesh_hosts
from meshpar.model.contract import Model
from meshpar.parallel.by_owners import Owners
from meshpar.parallel.grids.space import space_axes, space_dims
from meshpar.parallel.pipeline.chosen_execution import chosen_execution
from meshpar.parallel.pipeline.paired_stages import PAIRED
from meshpar.parallel.pipeline.program import PipelineProgram
from meshpar.parallel.pipeline.stages import Pipeline, pipeline_for
from meshpar.parallel.placement import DTYPES, Placement
from meshpar.parallel.prefetch import prefetch_notes
from meshpar.parallel.program import LocalProgram
from meshpar.rules.rules import Rules
from meshpar.rules.sharding import born_sharded
from meshpar.schedules import OwnSchedule
from meshpar.train.batch_placement import BatchPlacement
from meshpar.train.local_steps import (
    REPLICA_AXES,
    LocalStepFunctions,
    SyncPrograms,
    sync_notes,
)
from meshpar.train.optimizer.by_layer import by_layer, unrolled
from meshpar.train.optimizer_state import StateSharding, StateSpec
from meshpar.train.stashed_steps import (
    StashedStepFunctions,
    stash_note,
    stashed_step_functions,
)
from meshpar.train.state import TrainState, without_optimizer
from meshpar.train.step_functions import StepFunctions


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The arguments of `make_train_step`, which explains each, once they are checked.

    The layout's -1 is resolved; `platform` is that of the mesh: `cpu`, `gpu` or `tpu`.
    `outer_optimizer` is None without local steps.
    """

    model: Model
    optimizer: optax.GradientTransformation
    layout: Layout
    rules: Rules
    mesh: Mesh | AbstractMesh
    platform: str
    max_grad_norm: float | None = None
    gradient_dtype: str = "fp32"
    compiler_options: Mapping[str, Any] | None = None
    schedule: OwnSchedule | None = None
    outer_optimizer: optax.GradientTransformation | None = None
    gradient_reduction: str = "flat"
    devices_per_host: int | None = None
    state_spec: StateSpec | None = None
    unroll_optimizer: bool = False
    check: bool = True
    execution_reason: str = ""

    @property
    def hosts(self) -> tuple[int, ...] | None:
        """Return the host of each device of the mesh; None if unknown."""
        if self.devices_per_host:
            return tuple(at // self.devices_per_host for at in range(self.mesh.size))
        return mesh_hosts(self.mesh) if isinstance(self.mesh, Mesh) else None

    def without_devices(
        self, platform: str, devices_per_host: int | None = None
    ) -> StepOptions:
        """Return the same options for absent devices of another platform.

        Compiler options are for the mesh's own compiler, which without devices is this
        platform's.
        """
        is_absent = isinstance(self.mesh, AbstractMesh)
        chosen = bool(self.execution_reason)
        options = replace(
            self,
            layout=replace(self.layout, execution="auto") if chosen else self.layout,
            mesh=absent_mesh(self.layout),
            platform=platform,
            compiler_options=self.compiler_options if is_absent else None,
            gradient_reduction="flat",  # Hosts are absent too.
            devices_per_host=devices_per_host,
        )
        return options.with_execution()

    def with_execution(self) -> StepOptions:
        """Return the options with the execution that the layout leaves open."""
        if self.layout.stage == 1:
            return self
        execution, reason = chosen_execution(
            self.model, self.layout, self.schedule, platform=self.platform
        )
        layout = replace(self.layout, execution=execution)
        return replace(self, layout=layout, execution_reason=reason)


@dataclass(frozen=True)
class StepPlan:
    """The decisions of a step before it is traced.

    Args:
        options: The checked arguments of `make_train_step`.
    """

    options: StepOptions

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """The stages, their schedule and the model in their order.

        None without stages and microbatches: the step then runs the model once.
        """
        options = self.options
        if not options.layout.runs_in_ticks:
            return None
        return pipeline_for(options.model, options.layout, options.schedule)

    @property
    def model(self) -> Model:
        """The model, its layers arranged for the stages."""
        return self.pipeline.model if self.pipeline else self.options.model

    @cached_property
    def placement(self) -> Placement:
        """Specs of every parameter, gradient and state, and a step's collectives."""
        options = self.options
        return Placement(
            model=self.model,
            layout=options.layout,
            rules=options.rules,
            mesh=options.mesh,
            platform=options.platform,
            gradient_dtype=DTYPES[options.gradient_dtype],
            hosts=options.hosts,
            sums_by_host=options.gradient_reduction == "by_host",
        )

    @cached_property
    def batches(self) -> BatchPlacement:
        """Checks of batches, and their sharding over the batch axes."""
        model, placement, options = self.model, self.placement, self.options
        return BatchPlacement(
            inputs=model.inputs or {},
            check_sequences=partial(
                check_sequences, model, options.layout, options.rules
            )
            if placement.splits_tokens
            else None,
            layout=options.layout,
            sharding=NamedSharding(options.mesh, PartitionSpec(BATCH_AXES)),
            sharding_of=placement.batch_sharding if placement.splits_space else None,
        )

    @cached_property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer of the stacked parameters."""
        options = self.options
        if options.unroll_optimizer:
            return unrolled(options.optimizer, self.model, options.layout)
        replicas = () if options.outer_optimizer is None else REPLICA_AXES
        make_owners = partial(Owners.from_placement, self.placement, replicas)
        return by_layer(options.optimizer, self.model, options.layout, make_owners)

    @cached_property
    def whole(self) -> StepFunctions:
        """Functions of a step in which all devices train one set of parameters."""
        return self._functions(self.placement)

    @cached_property
    def functions(self) -> StepFunctions | LocalStepFunctions | StashedStepFunctions:
        """The functions that update a state: `whole`, or those of another update.

        With local steps, or updates of each stage by itself (`pipedream_stash`).
        """
        options = self.options
        if options.layout.updates_each_microbatch:
            return stashed_step_functions(
                self.whole, options.optimizer, options.layout.stage
            )
        if options.outer_optimizer is None:
            return self.whole
        replicas = replace(self.placement, replica_axes=REPLICA_AXES)
        return LocalStepFunctions(
            replica=self._functions(replicas),
            whole=self.whole,
            outer_optimizer=by_layer(
                self.options.outer_optimizer,
                self.model,
                self.options.layout,
                partial(Owners.from_placement, self.placement),
            ),
        )

    @cached_property
    def compiler_options(self) -> dict[str, Any]:
        """XLA's options for every program of the step."""
        layout = self.options.layout
        return compiler_options_for(
            self.options.platform,
            self.options.compiler_options,
            prefetching=self.placement.prefetches,
            sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
            by_host=self.placement.expert_hosts > 1,
            several_kinds=device_kinds(self.placement.mesh) > 1,
        )

    @cached_property
    def programs(self) -> StepPrograms:
        """The functions under `jax.jit`; none is compiled before its first call."""
        placement = self.placement
        return StepPrograms(
            functions=self.functions,
            reading=self.whole,
            batch_sharding=self.batches.sharding,
            split_space=placement if placement.splits_space else None,
            compiler_options=self.compiler_options,
            check_compiled=self._check_compiled,
        )

    @property
    def _check_compiled(self) -> Callable[[str], None] | None:
        """Check of a program whose places diverge, where XLA makes its collectives."""
        layout = self.options.layout
        diverges = layout.divergent or layout.data_splits
        if not diverges or layout.tensor == 1:
            return None
        axis = "data" if layout.data_splits else "stage"
        return partial(check_divergent, mesh_shape=layout.mesh_shape, axis=axis)

    @cached_property
    def sync_programs(self) -> SyncPrograms:
        """Programs that average the replicas of local steps."""
        return SyncPrograms(
            functions=cast(LocalStepFunctions, self.functions),
            compiler_options=self.compiler_options,
        )

    def audited_program(
        self,
        programs: StepPrograms,
        batch: Any,
        *,
        gradients_only: bool,
        sync_only: bool,
    ) -> tuple[Any, tuple[Any, ...], tuple[str, ...]]:
        """Return a program, shapes of its arguments, and notes on it, for an audit.

        Args:
            programs: Those of this plan, or of a step with other functions.
            batch: Shapes of a batch.
            gradients_only: Leave the optimizer out.
            sync_only: The end of an interval of local steps.
        """
        # JAX does not trace a jit with options of its own inside another.
        programs = replace(programs, compiler_options={}, check_compiled=None)
        state = programs.functions.state_shapes
        notes = prefetch_notes(self.placement)
        if self.placement.pairs_ticks:
            notes += (PAIRED,)
        if self.options.execution_reason:
            notes += (self.options.execution_reason,)
        if sync_only:
            averages = replace(self.sync_programs, compiler_options={})
            return averages.sync, (state,), notes
        if gradients_only:
            return programs.gradients, (programs.reading_shapes, batch), notes
        if self.options.outer_optimizer is not None:
            notes += sync_notes(self.sync_programs.functions, self.options.layout)
        if self.options.layout.updates_each_microbatch:
            notes += (stash_note(self.options.layout),)
        return programs.update, (state, batch), notes

    def _functions(self, placement: Placement) -> StepFunctions:
        options, pipeline = self.options, self.pipeline
        return StepFunctions(
            model_as_given=options.model,
            placement=placement,
            program=PipelineProgram(placement=placement, pipeline=pipeline)
            if pipeline
            else LocalProgram(placement=placement),
            optimizer=self.optimizer,
            max_grad_norm=options.max_grad_norm,
            state_sharding=StateSharding(options.state_spec, options.unroll_optimizer),
            check=options.check,
        )


@dataclass(frozen=True, kw_only=True)
class StepPrograms:
    """One program for each function; none is compiled before its first call.

    Args:
        functions: Functions that make and update a state (`initial_state`, `update`,
            `shardings`): `StepFunctions`, local steps', or those of a step with tables.
        reading: Functions that update nothing: the same, or, of local steps, those of
            the common parameters.
        batch_sharding: Sharding of batch arrays without split space.
        split_space: Placement of batch arrays with split space; None without any.
        compiler_options: XLA's options for every program.
        check_compiled: Refuses the text of a compiled program before it first runs;
            None for no check.
    """

    functions: Any
    reading: Any
    batch_sharding: NamedSharding
    split_space: Placement | None
    compiler_options: dict[str, Any]
    check_compiled: Callable[[str], None] | None = None

    @cached_property
    def init(self) -> Callable[..., Any]:
        """Seed -> the first state."""
        return born_sharded(
            self.functions.initial_state,
            self.functions.shardings,
            compiler_options=self.compiler_options,
        )

    @cached_property
    def init_from(self) -> Callable[..., Any]:
        """(seed, (parameters, state)) -> the first state; those given are donated."""
        return jax.jit(
            self.functions.initial_state,
            out_shardings=self.functions.shardings,
            donate_argnums=1,
            compiler_options=self.compiler_options,
        )

    @cached_property
    def update(self) -> Any:
        """(state, batch) -> the next state and metrics; the state is donated."""
        shardings = self.functions.shardings
        # Metrics are sharded as `skipped`, which is one of them.
        results = shardings, shardings.skipped
        return self._program(
            self.functions.update, shardings, results, donated=0, trains=True
        )

    @cached_property
    def gradients(self) -> Any:
        """(state without the optimizer's, batch) -> loss, metrics, gradients.

        Only of a model alone: a step with tables updates their rows in place.
        """
        whole = self.reading.shardings.step
        return self._program(
            self.reading.loss_and_gradients,
            without_optimizer(self.reading.shardings),
            (whole, whole, self.reading.gradient_shardings),
            trains=True,
        )

    @cached_property
    def evaluate(self) -> Any:
        """(state without the optimizer's, batch) -> metrics by name."""
        shardings = without_optimizer(self.reading.shardings)
        return self._program(self.reading.evaluated, shardings, shardings.step)

    @cached_property
    def logits(self) -> Any:
        """(state without the optimizer's, batch) -> logits."""
        # The model shards those of volumes; nothing gathers them.
        results = self.batch_sharding if self.split_space is None else None
        shardings = without_optimizer(self.reading.shardings)
        return self._program(self.reading.logits, shardings, results)

    @property
    def reading_shapes(self) -> TrainState:
        """Shape and dtype of the state for programs that update nothing."""
        return without_optimizer(self.reading.state_shapes)

    def _program(
        self,
        function: Callable[..., Any],
        state: TrainState,
        results: Any,
        *,
        donated: int | tuple[int, ...] = (),
        trains: bool = False,
    ) -> Any:
        """Return a function of (state, batch) under `jax.jit`, with these shardings."""

        def program(batch: Any) -> Any:
            return jax.jit(
                function,
                in_shardings=(state, batch),
                out_shardings=results,
                donate_argnums=donated,
                compiler_options=self.compiler_options,
            )

        space = self.split_space
        made: Any = program(self.batch_sharding) if space is None else None
        if space is not None:
            plain = PlainConvolutions(
                layout=space.layout,
                space_axes=space_axes(space.model, space.rules),
                space_dims=space_dims(space.model),
            )
            check = plain.check if trains else None
            made = _BatchProgram(program, space.batch_sharding, check)
        refuses = self.check_compiled
        return made if refuses is None else _CheckedProgram(made, refuses)


@dataclass(frozen=True)
class AuditedProgram:
    """One program of a step to audit: `audit(step.gradient_program, batch)`."""

    audit_subject: Callable[..., Subject]


class _CheckedProgram:
    """`jax.jit` of (state, batch), of which each compiled program is checked once.

    Args:
        program: The jitted function.
        check: Refuses the text of a compiled program.
    """

    def __init__(self, program: Any, check: Callable[[str], None]) -> None:
        self._program, self._check = program, check
        self._checked: set[tuple] = set()

    def __call__(self, state: Any, batch: Mapping[str, Any]) -> Any:
        shapes = tuple(sorted((name, array.shape) for name, array in batch.items()))
        if shapes not in self._checked:
            text = self.lower(state, batch).compile().as_text()
            assert text is not None
            self._check(text)
            self._checked.add(shapes)
        return self._program(state, batch)

    def lower(self, state: Any, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """Return the lowered program for these shapes."""
        return self._program.lower(state, batch)


class _BatchProgram:
    """`jax.jit` of (state, batch) for batches whose arrays are sharded one by one.

    Args:
        make: Shardings of a batch's arrays -> the jitted function.
        sharding_of: (name, array or its shape) -> its sharding.
        check: Refuses the trace of a program before it first runs; None for no check.
    """

    def __init__(
        self,
        make: Callable[[Any], Any],
        sharding_of: Callable[[str, Any], Any],
        check: Callable[[Any], None] | None = None,
    ) -> None:
        self._make, self._sharding_of, self._check = make, sharding_of, check
        self._checked: set[tuple] = set()
        self._made: dict[tuple, Any] = {}

    def __call__(self, state: Any, batch: Mapping[str, Any]) -> Any:
        return self._program(state, batch)(state, batch)

    def lower(self, state: Any, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """Return the lowered program for these shapes."""
        return self._program(state, batch).lower(state, batch)

    def _program(self, state: Any, batch: Mapping[str, Any]) -> Any:
        shardings = {name: self._sharding_of(name, it) for name, it in batch.items()}
        key = tuple(sorted(shardings.items(), key=lambda item: item[0]))
        if key not in self._made:
            self._made[key] = self._make(shardings)
        program = self._made[key]
        shapes = tuple(sorted((name, array.shape) for name, array in batch.items()))
        if self._check is not None and (key, shapes) not in self._checked:
            self._check(program.trace(state, batch))
            self._checked.add((key, shapes))
        return program
