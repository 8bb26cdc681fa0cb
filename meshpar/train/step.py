"""The sharded training step: from a model and a layout to one compiled program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from numbers import Real
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshpar.audit.hazards import PlainConvolutions
from meshpar.audit.subject import Subject
from meshpar.checks.sequence_lengths import check_sequences
from meshpar.checks.sequences import check_context, check_per_token
from meshpar.errors import InputError
from meshpar.hardware.compiler_options import compiler_options_for
from meshpar.layout import BATCH_AXES, Layout
from meshpar.machine.mesh import absent_mesh, make_mesh, mesh_hosts, mesh_platform
from meshpar.model.contract import Model, check_model
from meshpar.parallel.grids.space import check_space, space_axes, space_dims
from meshpar.parallel.pipeline.program import Pipeline, pipeline_of, with_costs
from meshpar.parallel.pipeline.stages import in_layer_order
from meshpar.parallel.placement import DTYPES, Placement
from meshpar.parallel.prefetch import prefetch_notes, prefetches
from meshpar.parallel.program import LocalProgram
from meshpar.parallel.remat import check_residual_names
from meshpar.rules.presets import default_rules
from meshpar.rules.rules import Rules, check_rules
from meshpar.rules.sharding import born_sharded
from meshpar.schedules import OwnSchedule
from meshpar.train.batch_placement import BatchPlacement, batch_structs
from meshpar.train.layer_order import check_seed, placed_start
from meshpar.train.local_steps import (
    REPLICA_AXES,
    LocalStepFunctions,
    StepCount,
    SyncPrograms,
    nesterov,
    sync_notes,
)
from meshpar.train.optimizer.by_layer import by_layer
from meshpar.train.refusals import (
    check_logits,
    experts_refusal,
    inputs_refusal,
    refuse,
    refuse_by_host,
    refuse_schedule,
    warn_of_idle_tensor,
)
from meshpar.train.replica_metrics import of_replicas_here
from meshpar.train.state import TrainState, check_state, to_use, without_optimizer
from meshpar.train.step_functions import Batch, Metrics, StepFunctions


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """A step's options, checked by `make_train_step`, which explains each.

    Args:
        model: As given.
        optimizer: As given.
        layout: Its -1 resolved.
        rules: Logical axis -> mesh axes.
        mesh: The devices, or none of them (`absent_mesh`).
        platform: Their kind: `cpu`, `gpu` or `tpu`.
        max_grad_norm: Global norm that gradients are scaled down to; None for none.
        gradient_dtype: `fp32` or `bf16`.
        compiler_options: XLA's, over those of the platform.
        schedule: The pipeline's, instead of the layout's.
        outer_optimizer: Of local steps; None without them.
        gradient_reduction: `flat` or `by_host`.
        check: Whether a model that may join examples is refused.
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
    check: bool = True

    def without_devices(self, platform: str) -> StepOptions:
        """The same for absent devices of another platform.

        Compiler options are for the mesh's own compiler, which without devices is this
        platform's.
        """
        is_absent = isinstance(self.mesh, AbstractMesh)
        return replace(
            self,
            mesh=absent_mesh(self.layout),
            platform=platform,
            compiler_options=self.compiler_options if is_absent else None,
            gradient_reduction="flat",  # of hosts that are not there
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
    check: bool = True,
) -> TrainStep:
    """A training step of `model` laid out as `layout` says.

    Args:
        model: A model under the contract (`meshpar.model.contract`).
        optimizer: An optax optimizer. It sees each layer's parameters by themselves,
            of the layer's own shape, whatever stacks them; what it holds of a parameter
            has its dims, all (Adam) or some of them (Adafactor), and lies as they do.
            It gets the loss as `value`, for `optax.contrib.reduce_on_plateau`. One that
            raises on a layer's shapes, as it closes over a mask of all layers, is given
            the stacked arrays where they hold the layers first to last.
        layout: The layout or its text form; a -1 absorbs the remaining devices.
        rules: Logical axis -> mesh axes; `default_rules(layout)` when absent.
        devices: Devices to use; JAX's by default: the first of them, with a warning,
            where the layout needs fewer.
        mesh: A mesh with meshpar's six axes, instead of `devices`. On an
            `absent_mesh` the step can be audited for an absent target, not run.
        max_grad_norm: Scale gradients down to this global norm; None for no limit.
        gradient_dtype: In which gradients are kept, and added up over microbatches and
            devices; bf16 halves memory and traffic, and loses small contributions.
        compiler_options: XLA's options for every program of the step, as `jax.jit`
            takes them, over those that the platform has
            (`meshpar.hardware.compiler_options`); None as a value leaves one out.
        schedule: The pipeline's, instead of one that the layout names: a
            `meshpar.schedules.Schedule`, one order a rank such as `["0F0", "0B0"]`,
            or a CSV file with one row a rank.
        layer_costs: What each layer costs, in any unit, for `splits=cost`; the model's
            own (`BlockGroup.costs`) or its matmul FLOPs when absent.
        outer_optimizer: With local steps (`sync_every`), an optax optimizer of the
            parameters that all replicas have in common; it gets start less the mean
            of the replicas as its gradient, each layer by itself as `optimizer`, and
            no loss (`value` is NaN). SGD of rate 0.7 with Nesterov momentum 0.9 when
            absent (`meshpar.train.local_steps`).
        gradient_reduction: On CPUs of several processes `by_host` sums gradients inside
            each host, then across, which sends less between hosts and more in all
            (`meshpar.parallel.reduction`); GPUs and TPUs do so by themselves.
        check: Whether a model that may join the examples of a batch is refused where
            devices or microbatches have some each. What its trace leaves open costs
            some seconds once, as a small instance runs
            (`meshpar.checks.examples`).

    Raises:
        RuleError: A parameter cannot be laid out, or a rule for activations uses `data`
            or `fsdp` for anything but the batch, or the layout splits experts that the
            model does not have.
        InputError: `model` or `optimizer` is something else, or the layout does not
            fit the devices, or asks for what is not built, or `max_grad_norm` is not
            positive, or the optimizer has large state of no parameter while the layout
            splits states, or what it does to each layer cannot be told
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
        outer_optimizer=outer_optimizer,
        gradient_reduction=gradient_reduction,
        check=check,
    )
    refuse(layout, rules, mesh, options.platform)
    _check_options(options)
    refused = experts_refusal(model, layout)
    if refused is not None:
        raise refused
    refused_input = inputs_refusal(model, layout)
    if refused_input is not None:
        raise refused_input
    outer_optimizer = outer_optimizer_of(layout, outer_optimizer)
    refuse_by_host(gradient_reduction, layout, mesh, options.platform)
    step = TrainStep(replace(options, outer_optimizer=outer_optimizer))
    warn_of_idle_tensor(model, step.placement)
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


def outer_optimizer_of(
    layout: Layout, outer_optimizer: optax.GradientTransformation | None
) -> optax.GradientTransformation | None:
    """The outer optimizer of a layout's local steps; None without any.

    Raises:
        InputError: One is given, but the layout has no local steps.
    """
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
            hosts=mesh_hosts(self._devices_mesh)
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
            `weight_sum` and `skipped` sums (`meshpar.train.replica_metrics`).

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


@dataclass(frozen=True)
class AuditedProgram:
    """What `meshpar.audit` takes: `audit(step.gradient_program, batch)`.

    Args:
        audit_subject: As of a `TrainStep`.
    """

    audit_subject: Callable[..., Subject]


def chosen_programs(
    options: StepOptions,
    placement: Placement,
    pipeline: Pipeline | None,
    *,
    batch_sharding: NamedSharding,
    compiler_options: dict[str, Any],
) -> StepPrograms[StepFunctions | LocalStepFunctions, StepFunctions]:
    """A step's programs: of one state, or of replicas that train by themselves.

    Args:
        options: Of the step.
        placement: Where parameters, gradients and states lie.
        pipeline: The model arranged for its stages; None without microbatches.
        batch_sharding: How the arrays of a batch lie.
        compiler_options: XLA's, of every program.
    """
    model, layout = placement.model, placement.layout
    optimizer = by_layer(options.optimizer, model, layout)

    def functions_of(placement: Placement) -> StepFunctions:
        return StepFunctions(
            model_as_given=options.model,
            placement=placement,
            program=pipeline.program(placement)
            if pipeline
            else LocalProgram(placement=placement),
            optimizer=optimizer,
            max_grad_norm=options.max_grad_norm,
            check=options.check,
        )

    functions: StepFunctions | LocalStepFunctions
    functions = whole = functions_of(placement)
    if options.outer_optimizer is not None:
        functions = LocalStepFunctions(
            replica=functions_of(replace(placement, replica_axes=REPLICA_AXES)),
            whole=whole,
            outer_optimizer=by_layer(options.outer_optimizer, model, layout),
        )
    return StepPrograms(
        functions=functions,
        reading=whole,
        batch_sharding=batch_sharding,
        split_space=placement if placement.splits_space else None,
        compiler_options=compiler_options,
    )


class Updating(Protocol):
    """What makes and updates a state."""

    @property
    def shardings(self) -> TrainState:
        """The sharding of every array of the state."""

    def born(self, seed: jax.Array) -> TrainState:
        """The first state."""

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The next state, and metrics."""


class Reading(Protocol):
    """What updates nothing."""

    @property
    def shardings(self) -> TrainState:
        """The sharding of every array of the state."""

    @property
    def state_shapes(self) -> TrainState:
        """Shape and dtype of every array."""

    def evaluated(self, state: TrainState, batch: Batch) -> Any:
        """Summed loss and weights."""

    def logits(self, state: TrainState, batch: Batch) -> Any:
        """What the model's `logits` gives."""


_Updating = TypeVar("_Updating", bound=Updating)
_Reading = TypeVar("_Reading", bound=Reading)


@dataclass(frozen=True, kw_only=True)
class StepPrograms(Generic[_Updating, _Reading]):
    """One program for each function; none is compiled before its first call.

    Args:
        functions: What makes and updates a state: `StepFunctions`, those of local
            steps, or those of a step with tables.
        reading: What updates nothing: the same ones; of local steps, those of the
            common parameters.
        batch_sharding: How the arrays of a batch lie that have no split space.
        split_space: Where the arrays lie that have; None where there are none.
        compiler_options: XLA's, of every program.
    """

    functions: _Updating
    reading: _Reading
    batch_sharding: NamedSharding
    split_space: Placement | None
    compiler_options: dict[str, Any]

    @cached_property
    def init(self) -> Callable[..., Any]:
        """Seed -> the first state."""
        return born_sharded(
            self.functions.born,
            self.functions.shardings,
            compiler_options=self.compiler_options,
        )

    @cached_property
    def init_from(self) -> Callable[..., Any]:
        """(seed, (parameters, state)) -> the first state; those given are donated."""
        return jax.jit(
            self.functions.born,
            out_shardings=self.functions.shardings,
            donate_argnums=1,
            compiler_options=self.compiler_options,
        )

    @cached_property
    def update(self) -> Any:
        """(state, batch) -> the next state and metrics; the state is donated."""
        shardings = self.functions.shardings
        # Metrics lie as `skipped` does, which is one of them.
        return self._of_batch(
            self.functions.update,
            shardings,
            (shardings, shardings.skipped),
            donated=0,
            trains=True,
        )

    @cached_property
    def gradients(self: StepPrograms[_Updating, StepFunctions]) -> Any:
        """(state without the optimizer's, batch) -> loss, metrics, gradients.

        Of a model alone: a step with tables updates their rows in place.
        """
        return self._of_batch(
            self.reading.loss_and_gradients,
            self._lies_to_use,
            (self._whole, self._whole, self.reading.of_states),
            trains=True,
        )

    @cached_property
    def evaluate(self) -> Any:
        """The same -> summed loss and weights."""
        return self._of_batch(self.reading.evaluated, self._lies_to_use, self._whole)

    @cached_property
    def logits(self) -> Any:
        """The same -> logits."""
        # Of volumes the model says how they lie; nothing gathers them.
        lie = self.batch_sharding if self.split_space is None else None
        return self._of_batch(self.reading.logits, self._lies_to_use, lie)

    @property
    def shapes_to_use(self) -> TrainState:
        """Shape and dtype of what the programs take that update nothing."""
        return without_optimizer(self.reading.state_shapes)

    @property
    def _lies_to_use(self) -> TrainState:
        return without_optimizer(self.reading.shardings)

    @property
    def _whole(self) -> NamedSharding:
        """The sharding of what all devices have, such as the number of steps."""
        return self.reading.shardings.step

    def _of_batch(
        self,
        function: Callable[..., Any],
        state: TrainState,
        results: Any,
        *,
        donated: int | tuple[int, ...] = (),
        trains: bool = False,
    ) -> Any:
        """A function of (state, batch), given how the state and its results lie."""

        def program(batch: Any) -> Any:
            return jax.jit(
                function,
                in_shardings=(state, batch),
                out_shardings=results,
                donate_argnums=donated,
                compiler_options=self.compiler_options,
            )

        space = self.split_space
        if space is None:
            return program(self.batch_sharding)
        plain = PlainConvolutions(
            layout=space.layout,
            space_axes=space_axes(space.model, space.rules),
            space_dims=space_dims(space.model),
        )
        check = plain.check if trains else None
        return BatchProgram(program, space.batch_sharding, check)


Make = Callable[[Any], Any]
"""How a batch lies -> the jitted function."""


class BatchProgram:
    """`jax.jit` of (state, batch), one for each set of arrays that a batch may have.

    Args:
        make: How a batch lies, a tree of shardings beside it -> the function.
        sharding_of: (name, array or its shape) -> its sharding.
        check: Refuses what `jax.jit(f).trace` gives; for each set of shapes, before
            anything of it runs.
    """

    def __init__(
        self,
        make: Make,
        sharding_of: Callable[[str, Any], Any],
        check: Callable[[Any], None] | None = None,
    ) -> None:
        self._make, self._sharding_of, self._check = make, sharding_of, check
        self._checked: set[tuple] = set()
        self._made: dict[tuple, Any] = {}

    def __call__(self, state: Any, batch: Mapping[str, Any]) -> Any:
        """What the function gives."""
        return self._program(state, batch)(state, batch)

    def lower(self, state: Any, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """As of what `jax.jit` returns."""
        return self._program(state, batch).lower(state, batch)

    def _program(self, state: Any, batch: Mapping[str, Any]) -> Any:
        lie = {name: self._sharding_of(name, array) for name, array in batch.items()}
        key = tuple(sorted(lie.items(), key=lambda item: item[0]))
        if key not in self._made:
            self._made[key] = self._make(lie)
        program = self._made[key]
        if self._check is not None:
            shapes = tuple(sorted((name, array.shape) for name, array in batch.items()))
            if (key, shapes) not in self._checked:
                self._check(program.trace(state, batch))
                self._checked.add((key, shapes))
        return program
