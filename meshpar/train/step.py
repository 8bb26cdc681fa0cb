"""The sharded training step: from a model and a layout to one compiled program.

`make_train_step` checks its arguments and keeps them as `StepOptions`; `TrainStep` says
where everything is placed, and calls the programs of `StepPrograms`, which are the
functions of `step_functions.StepFunctions` under `jax.jit`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from numbers import Real
from typing import Any, Literal, cast

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshpar.audit.subject import Subject
from meshpar.checks.sequence_lengths import check_sequences
from meshpar.checks.sequences import check_context, check_per_token
from meshpar.errors import InputError
from meshpar.hardware.compiler_options import compiler_options_for
from meshpar.layout import BATCH_AXES, Layout
from meshpar.machine.mesh import absent_mesh, make_mesh, mesh_hosts, mesh_platform
from meshpar.model.contract import Model, check_model
from meshpar.parallel.grids.space import check_space
from meshpar.parallel.pipeline.program import PipelineProgram
from meshpar.parallel.pipeline.stages import in_layer_order, pipeline_for, with_costs
from meshpar.parallel.placement import DTYPES, Placement
from meshpar.parallel.prefetch import prefetch_notes, prefetches
from meshpar.parallel.program import LocalProgram
from meshpar.parallel.remat import check_residual_names
from meshpar.rules.presets import default_rules
from meshpar.rules.rules import Rules, check_rules
from meshpar.schedules import OwnSchedule
from meshpar.train.batch_placement import BatchPlacement, batch_structs
from meshpar.train.layer_order import placed_start
from meshpar.train.local_steps import (
    REPLICA_AXES,
    LocalStepFunctions,
    StepCount,
    SyncPrograms,
    nesterov,
    sync_notes,
)
from meshpar.train.optimizer.by_layer import by_layer
from meshpar.train.optimizer.unrolled import unrolled
from meshpar.train.optimizer_state import (
    StateSharding,
    StateSpec,
    WholeStateWarning,
    whole_state_message,
)
from meshpar.train.refusals import (
    check_logits,
    experts_refusal,
    inputs_refusal,
    refuse,
    refuse_by_host,
    refuse_schedule,
    warn_idle_tensor,
)
from meshpar.train.replica_metrics import local_replica_metrics
from meshpar.train.state import (
    TrainState,
    check_seed,
    check_state,
    checked_without_optimizer,
)
from meshpar.train.step_functions import (
    Batch,
    Metrics,
    StepFunctions,
    StepPrograms,
)

__all__ = ["Batch", "Metrics", "StepOptions", "TrainStep", "make_train_step"]


@dataclass(frozen=True)
class AuditedProgram:
    """One program of a step to audit: `audit(step.gradient_program, batch)`."""

    audit_subject: Callable[..., Subject]


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
    state_spec: StateSpec | None = None
    unroll_optimizer: bool = False
    check: bool = True

    def without_devices(self, platform: str) -> StepOptions:
        """Return the same options for absent devices of another platform.

        Compiler options are for the mesh's own compiler, which without devices is this
        platform's.
        """
        is_absent = isinstance(self.mesh, AbstractMesh)
        return replace(
            self,
            mesh=absent_mesh(self.layout),
            platform=platform,
            compiler_options=self.compiler_options if is_absent else None,
            gradient_reduction="flat",  # Hosts are absent too.
        )


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout | str,
    *,
    rules: Rules | None = None,
    devices: Sequence[jax.Device] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    max_grad_norm: float | None = None,
    gradient_dtype: Literal["fp32", "bf16"] = "fp32",
    compiler_options: Mapping[str, Any] | None = None,
    schedule: OwnSchedule | None = None,
    layer_costs: Sequence[float] | None = None,
    outer_optimizer: optax.GradientTransformation | None = None,
    gradient_reduction: Literal["flat", "by_host"] = "flat",
    state_spec: StateSpec | None = None,
    unroll_optimizer: bool = False,
    check: bool = True,
) -> TrainStep:
    """Return the training step of `model` under `layout`.

    Args:
        model: A model under the contract (`meshpar.model.contract`).
        optimizer: An optax optimizer. It sees each layer's parameters by themselves,
            of the layer's own shape, whatever stacks them; its state of a parameter
            that has the parameter's dims, all (Adam) or some of them (Adafactor), is
            sharded as they are. It gets the loss as `value`, for
            `optax.contrib.reduce_on_plateau`. One that raises on a layer's shapes, as
            it closes over a mask of all layers, gets the stacked arrays where they
            hold the layers first to last.
        layout: The layout or its text form; a -1 absorbs the remaining devices.
        rules: Logical axis -> mesh axes; `default_rules(layout)` when absent.
        devices: Devices to use; JAX's by default: the first of them, with a warning,
            where the layout needs fewer.
        mesh: A mesh with meshpar's six axes, instead of `devices`. On an
            `absent_mesh` the step can be audited for an absent target, not run.
        max_grad_norm: Scale gradients down to this global norm; None for no limit.
        gradient_dtype: Dtype of gradients, in which they are added up over
            microbatches and devices; bf16 halves memory and traffic, and loses small
            contributions.
        compiler_options: XLA's options for every program of the step, as `jax.jit`
            takes them, over those of the platform
            (`meshpar.hardware.compiler_options`); None as a value leaves one out.
        schedule: Schedule of the pipeline, instead of one that the layout names: a
            `meshpar.schedules.Schedule`, one order a rank such as `["0F0", "0B0"]`,
            or a CSV file with one row a rank.
        layer_costs: Cost of each layer, in any unit, for `splits=cost`; the model's
            own (`BlockGroup.costs`) or its matmul FLOPs when absent.
        outer_optimizer: With local steps (`sync_every`), an optax optimizer of the
            parameters that all replicas have in common; it gets start less the mean
            of the replicas as its gradient, each layer by itself as `optimizer`, and
            no loss (`value` is NaN). SGD of rate 0.7 with Nesterov momentum 0.9 when
            absent (`meshpar.train.local_steps`).
        gradient_reduction: On CPUs of several processes `by_host` sums gradients inside
            each host, then across, which sends less between hosts and more in all
            (`meshpar.parallel.reduction`); GPUs and TPUs do so by themselves.
        state_spec: Sharding of optimizer state that has other dims than its parameter,
            such as a preconditioner or blocks of 8-bit values: (path in the optimizer's
            state, shape for one layer) -> PartitionSpec over mesh axes, or None for the
            default. By default such state is whole on every device, with a warning if
            it is large while the layout splits states.
        unroll_optimizer: Give the optimizer each layer as a parameter of its own, at
            paths such as `blocks.up.0`: for one that looks at several parameters at
            once or counts them (distributed Shampoo, noise). Its program grows with
            the number of layers.
        check: Whether a model that may join the examples of a batch is refused where
            devices or microbatches have some each. Where its trace leaves that open, a
            small instance runs once, which takes some seconds
            (`meshpar.checks.examples`).

    Raises:
        RuleError: A parameter cannot be laid out, or a rule for activations uses `data`
            or `fsdp` for anything but the batch, or the layout splits experts that the
            model does not have.
        InputError: `model` or `optimizer` is something else, or the layout does not
            fit the devices, or asks for what is not supported, or `max_grad_norm` is
            not positive, or the optimizer has large state of no parameter while the
            layout splits states, or its effect on each layer cannot be told
            (`optax.flatten`, noise), or the layout
            splits or averages what an input with a gradient needs whole (`context`,
            `sync_every`), or `schedule` is wrong (who waits for what, which
            work is missing or doubled) or made for other sizes.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> from flax import nnx
        >>> from meshpar import Input, from_nnx
        >>> class Ends(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.out = nnx.Linear(8, 1, rngs=rngs)
        ...     def embed(self, batch, scope):
        ...         return batch["x"]
        ...     def head(self, stream, batch, scope):
        ...         losses = (self.out(stream)[:, 0] - batch["y"]) ** 2
        ...         return losses.sum(), jnp.float32(losses.size)
        >>> class Block(nnx.Module):
        ...     def __init__(self, rngs):
        ...         axes = {"out_sharding": ("embed", "mlp")}
        ...         self.up = nnx.Linear(8, 8, kernel_metadata=axes, rngs=rngs)
        ...     def __call__(self, stream, scope):
        ...         return jnp.tanh(self.up(stream))
        >>> x = Input(("batch", None), shape=(None, 8))
        >>> inputs = {"x": x, "y": Input(("batch",))}
        >>> model = from_nnx(ends=Ends, block=Block, num_layers=2, inputs=inputs)
        >>> step = make_train_step(model, optax.adam(1e-3), "data=-1")
        >>> state = step.init(seed=0)
        >>> state, metrics = step(state, dict(x=np.ones((8, 8)), y=np.ones(8)))
        >>> sorted(metrics)
        ['grad_norm', 'loss', 'skipped', 'weight_sum']
    """
    check_model(model)
    _check_optimizer(optimizer)
    layout = Layout.of(layout)
    if mesh is None:
        mesh = make_mesh(layout, devices)
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise InputError(
            f"mesh is a {type(mesh).__name__}; give one of make_mesh(layout)",
            key="mesh.not_a_mesh",
        )
    layout = layout.resolve(mesh.size)
    if schedule is not None:
        refuse_schedule(layout)
    if layer_costs is not None:
        model = with_costs(model, layer_costs, layout)
    check_residual_names(model, layout.remat)
    rules = default_rules(layout) if rules is None else rules
    check_rules(rules)
    options = StepOptions(
        model=model,
        optimizer=optimizer,
        layout=layout,
        rules=rules,
        mesh=mesh,
        platform=mesh_platform(mesh),
        max_grad_norm=max_grad_norm,
        gradient_dtype=gradient_dtype,
        compiler_options=compiler_options,
        schedule=schedule,
        gradient_reduction=gradient_reduction,
        state_spec=state_spec,
        unroll_optimizer=unroll_optimizer,
        check=check,
    )
    refuse(layout, rules, mesh, options.platform)
    _check_options(options)
    for refused in (experts_refusal(model, layout), inputs_refusal(model, layout)):
        if refused is not None:
            raise refused
    outer_optimizer = _outer_optimizer(layout, outer_optimizer)
    refuse_by_host(gradient_reduction, layout, mesh, options.platform)
    step = TrainStep(replace(options, outer_optimizer=outer_optimizer))
    warn_idle_tensor(model, step.placement)
    for path, num_bytes in step.whole_states():
        message = whole_state_message(path, num_bytes)
        warnings.warn(message, WholeStateWarning, stacklevel=2)
    return step


def _check_options(options: StepOptions) -> None:
    if options.gradient_dtype not in DTYPES:
        raise InputError(
            f"gradient_dtype={options.gradient_dtype!r}: must be one of "
            f"{', '.join(DTYPES)}",
            key="step.unknown_gradient_dtype",
        )
    norm = options.max_grad_norm
    if norm is not None and not (isinstance(norm, Real) and norm > 0):
        raise InputError(
            f"max_grad_norm={norm!r}: must be positive, or None for no limit",
            key="value.not_positive",
        )


def _check_optimizer(optimizer: Any, name: str = "optimizer") -> None:
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InputError(
            f"{name} is {optimizer!r}; give an optax optimizer, such as "
            "optax.adamw(1e-3)",
            key="optimizer.not_an_optimizer",
        )


def _outer_optimizer(
    layout: Layout, outer_optimizer: optax.GradientTransformation | None
) -> optax.GradientTransformation | None:
    """Return the outer optimizer of a layout's local steps; None without any."""
    if outer_optimizer is not None:
        _check_optimizer(outer_optimizer, "outer_optimizer")
    if layout.sync_every > 1:
        return outer_optimizer or nesterov()
    if outer_optimizer is not None:
        raise InputError(
            f"layout {str(layout)!r} has sync_every=1: it averages the gradients of "
            "every step, and no outer optimizer runs; leave outer_optimizer out, or "
            "set sync_every to 2 or more",
            key="optimizer.outer_without_local_steps",
        )
    return None


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
        self.options = options
        self.model_as_given, self.layout = options.model, options.layout
        self.rules, self.mesh = options.rules, options.mesh
        self.platform = options.platform
        model, layout = options.model, options.layout
        check_space(model, layout, options.rules)
        check_context(model, layout, options.rules)
        check_per_token(model, layout)
        self._devices_mesh = cast(Mesh, self.mesh)  # `jax.set_mesh` refuses any other
        pipeline = None
        if layout.runs_in_ticks:
            pipeline = pipeline_for(model, layout, options.schedule)
        self.schedule = pipeline.schedule if pipeline else None
        self.layers_of_stages = pipeline.stage_layers if pipeline else None
        self.model = pipeline.model if pipeline else model
        by_host = options.gradient_reduction == "by_host"
        placement = self.placement = Placement(
            model=self.model,
            layout=layout,
            rules=self.rules,
            mesh=self.mesh,
            platform=self.platform,
            gradient_dtype=DTYPES[options.gradient_dtype],
            hosts=mesh_hosts(self._devices_mesh) if by_host else None,
        )
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
        make = unrolled if options.unroll_optimizer else by_layer
        optimizer = make(options.optimizer, self.model, layout)

        def functions(placement: Placement) -> StepFunctions:
            return StepFunctions(
                model_as_given=model,
                placement=placement,
                program=PipelineProgram(placement=placement, pipeline=pipeline)
                if pipeline
                else LocalProgram(placement=placement),
                optimizer=optimizer,
                max_grad_norm=options.max_grad_norm,
                state_sharding=StateSharding(
                    options.state_spec, options.unroll_optimizer
                ),
                check=options.check,
            )

        self.functions: StepFunctions | LocalStepFunctions
        self.functions = whole = functions(placement)
        if options.outer_optimizer is not None:
            self._step_count = StepCount()
            self.functions = LocalStepFunctions(
                replica=functions(replace(placement, replica_axes=REPLICA_AXES)),
                whole=whole,
                outer_optimizer=by_layer(options.outer_optimizer, self.model, layout),
            )
        self._programs = StepPrograms(
            functions=self.functions,
            reading=whole,
            batch_sharding=self.batch_sharding,
            split_space=placement if placement.splits_space else None,
            compiler_options=self.compiler_options,
        )
        self.state_shapes = self.functions.state_shapes
        self.shardings = self.functions.shardings

    def with_functions(self, functions: Any, inputs: Mapping[str, Any]) -> TrainStep:
        """Return a step of other functions on this step's mesh, such as with tables.

        Args:
            functions: `born`, `update`, `evaluated` and `logits`, which may call those
                of this step's `functions`; `state_shapes` and `shardings` of their
                state. Local steps refuse them.
            inputs: Arrays of a batch, `meshpar.Input` by name.
        """
        step = copy.copy(self)
        step.functions = functions
        step.state_shapes, step.shardings = functions.state_shapes, functions.shardings
        step._batches = BatchPlacement(
            inputs=inputs,
            check_sequences=lambda batch, partly: None,
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
            return self._programs.init_from(
                np.uint32(seed),
                placed_start(self.model, self.shardings, params, model_state or {}),
            )

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
            `weight_sum` and `skipped` sums (`meshpar.train.replica_metrics`).

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
                state = self._sync_programs.sync(state)
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

    def evaluate(self, state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return summed loss and weights, without dropout and auxiliary losses.

        Args:
            state: From `init` or a step; it is not donated.
            batch: As `__call__` takes it.

        Raises:
            InputError: As for `__call__`.
        """
        with jax.set_mesh(self._devices_mesh):
            return self._programs.evaluate(
                self._reading_state(state), self.place(batch)
            )

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
        with jax.set_mesh(self._devices_mesh):
            return self._programs.update.lower(*self._argument_shapes(batch))

    def compile(self, batch: Batch) -> jax.stages.Compiled:
        """Return the compiled step for a batch of arrays or `jax.ShapeDtypeStruct`s."""
        with jax.set_mesh(self._devices_mesh):
            return self.lower(batch).compile()

    def for_absent(self, platform: str) -> TrainStep:
        """Return the same step for absent devices of another platform."""
        schedule = self.schedule if self.layout.stage > 1 else None
        return TrainStep(
            replace(self.options.without_devices(platform), schedule=schedule)
        )

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
        gradients_only: bool = False,
        sync_only: bool = False,
    ) -> Subject:
        """Return the program that `meshpar.audit` compiles and explains.

        Args:
            arguments: A batch, or a state and a batch; arrays or their shapes.
            platform: Kind of the absent devices, or None for the step's own.
            gradients_only: Leave the optimizer out (`gradient_program`).
            sync_only: The end of an interval of local steps (`sync_program`).

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
            function, given = programs.gradients, (programs.reading_shapes, batch)
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
    def _sync_programs(self) -> SyncPrograms:
        """Programs that average the replicas of local steps."""
        return SyncPrograms(
            functions=cast(LocalStepFunctions, self.functions),
            compiler_options=self.compiler_options,
        )

    def _reading_state(self, state: TrainState) -> TrainState:
        """Return the state for programs that update nothing."""
        if not self.is_local:
            return checked_without_optimizer(
                state, self.state_shapes, self._devices_mesh
            )
        check_state(state, self.state_shapes, self._devices_mesh)
        with jax.set_mesh(self._devices_mesh):
            return self._sync_programs.common_reading_state(state)

    def _argument_shapes(self, batch: Batch) -> tuple[TrainState, Batch]:
        self._batches.check(batch)
        return self.state_shapes, batch_structs(batch)
