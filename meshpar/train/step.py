"""The sharded training step: one compiled program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshpar.audit.subject import Subject
from meshpar.errors import InputError
from meshpar.hardware.compiler_options import compiler_options_for
from meshpar.layout import BATCH_AXES, Layout
from meshpar.mesh import absent_mesh
from meshpar.model.contract import Model
from meshpar.model.parameter import Params
from meshpar.model.tracing import check_examples_first
from meshpar.parallel.pipeline.program import pipeline_of
from meshpar.parallel.pipeline.schedule_choice import OwnSchedule
from meshpar.parallel.pipeline.stages import in_layer_order
from meshpar.parallel.placement import DTYPES, Placement
from meshpar.parallel.prefetch_choice import prefetch_notes, prefetches
from meshpar.parallel.program import LocalProgram
from meshpar.rules.rules import Rules
from meshpar.rules.sharding import born_sharded
from meshpar.train.batch_placement import BatchPlacement
from meshpar.train.constants import put_in, take_out
from meshpar.train.gradient_program import GradientProgram
from meshpar.train.layer_order import layer_orders
from meshpar.train.optimizer.by_layer import by_layer
from meshpar.train.state import (
    TrainState,
    check_not_donated,
    initial_state,
    state_shardings,
    without_optimizer,
)
from meshpar.train.update import Update

Batch = Mapping[str, Any]
Metrics = dict[str, jax.Array]


class TrainStep:
    """A compiled training step; make it with `make_train_step`.

    Attributes:
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
    """

    def __init__(
        self,
        *,
        model: Model,
        optimizer: optax.GradientTransformation,
        layout: Layout,
        rules: Rules,
        mesh: Mesh | AbstractMesh,
        platform: str,
        max_grad_norm: float | None,
        gradient_dtype: str,
        compiler_options: Mapping[str, Any] | None,
        schedule: OwnSchedule | None,
    ) -> None:
        self.model_as_given = model
        pipeline = (
            pipeline_of(model, layout, schedule) if layout.runs_in_ticks else None
        )
        self.schedule = pipeline.schedule if pipeline else None
        self.layers_of_stages = pipeline.layers_of_stages if pipeline else None
        model = pipeline.model if pipeline else model
        self.model, self.layout, self.rules, self.mesh = model, layout, rules, mesh
        self._devices_mesh = cast(Mesh, mesh)  # `jax.set_mesh` refuses any other
        self.platform = platform
        self._optimizer_as_given, self._max_grad_norm = optimizer, max_grad_norm
        self._optimizer = by_layer(optimizer, model, layout)
        self._gradient_dtype = gradient_dtype
        placement = self.placement = Placement(
            model=model,
            layout=layout,
            rules=rules,
            mesh=mesh,
            platform=platform,
            gradient_dtype=DTYPES[gradient_dtype],
        )
        self._program = (
            pipeline.program(placement)
            if pipeline
            else LocalProgram(placement=placement)
        )
        apart = jax.eval_shape(lambda: self._first_state(jnp.uint32(0)))
        self.state_shapes = put_in(model, apart)
        self.layer_orders = put_in(model, layer_orders(model, apart))
        at_rest, of_states, of_model = self._shardings()
        self.shardings = put_in(
            model,
            state_shardings(
                apart, at_rest, of_states, of_model, layout.optimizer_memory
            ),
        )
        self._apply_gradients = Update(
            placement=placement,
            optimizer=self._optimizer,
            max_grad_norm=max_grad_norm,
            of_states=of_states,
        )
        self.batch_sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        self._batches = BatchPlacement(
            inputs=model.inputs or {}, layout=layout, sharding=self.batch_sharding
        )
        self._options_as_given = compiler_options
        self.compiler_options = compiler_options_for(
            platform,
            compiler_options,
            prefetching=prefetches(placement),
            sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
        )
        self._make_programs(of_states)

    def _make_programs(self, of_states: Params) -> None:
        """The step's functions under `jax.jit`; none is compiled before its first call.

        Args:
            of_states: Sharding of each parameter's gradient and optimizer state.
        """
        options = self.compiler_options or None
        self._init = born_sharded(self._born, self.shardings, compiler_options=options)
        jit = functools.partial(jax.jit, compiler_options=options)
        metrics_sharding = NamedSharding(self.mesh, PartitionSpec())
        self._update_layout: dict[str, Any] = dict(
            in_shardings=(self.shardings, self.batch_sharding),
            out_shardings=(self.shardings, metrics_sharding),
            donate_argnums=0,
        )
        self._step = jit(self._update, **self._update_layout)
        given = (without_optimizer(self.shardings), self.batch_sharding)
        self._gradients_layout: dict[str, Any] = dict(
            in_shardings=given,
            out_shardings=(metrics_sharding, metrics_sharding, of_states),
        )
        self._gradients = jit(self._loss_and_gradients, **self._gradients_layout)

        def evaluated(program: Callable[..., Any], sharding: NamedSharding) -> Any:
            return jit(
                lambda state, batch: program(*self._given(state, batch)),
                in_shardings=given,
                out_shardings=sharding,
            )

        self._evaluate = evaluated(self._program.loss_sums, metrics_sharding)
        self._logits = evaluated(self._program.logits, self.batch_sharding)

    def init(self, seed: int) -> TrainState:
        """The first state, a function of `seed` alone; arrays are born in shards.

        Raises:
            InputError: `seed` is no whole number from 0 to 2**32 - 1.
        """
        whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
        if not whole:
            raise InputError(f"seed={seed!r}: must be a whole number below {2**32}")
        if not 0 <= seed < 2**32:
            raise InputError(f"seed={seed}: must be at least 0 and below {2**32}")
        with jax.set_mesh(self._devices_mesh):
            return self._init(np.uint32(seed))

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step; `state` is donated and cannot be used again.

        Args:
            state: From `init` or an earlier step.
            batch: The arrays that the model declares or reads, by name, each with the
                example first; of several processes each gives its own rows.

        Returns:
            The new state, and scalars that every process can read. These are `loss` and
            `grad_norm` (before any scaling) of the old parameters, `weight_sum`, the
            mean of each auxiliary loss before its coefficient (`auxiliary.NAME`), and
            `skipped`, the steps so far whose gradients were not finite and changed
            nothing.

        Raises:
            InputError: Shapes differ, or the global batch does not divide over the
                batch axes.
        """
        check_not_donated(state)
        with jax.set_mesh(self._devices_mesh):
            return self._step(state, self.place(batch))

    def loss_and_gradients(
        self, state: TrainState, batch: Batch
    ) -> tuple[jax.Array, Any]:
        """The loss of a batch and its gradients, in the step's `gradient_dtype`.

        What a step would apply, before any scaling, laid out as the optimizer's state:
        for research code, and for comparing layouts.

        Args:
            state: From `init` or a step; it is not donated.
            batch: As `__call__` takes it.

        Raises:
            InputError: As for `__call__`.
        """
        with jax.set_mesh(self._devices_mesh):
            loss, _, gradients = self._gradients(
                without_optimizer(state), self.place(batch)
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
            return self._evaluate(without_optimizer(state), self.place(batch))

    def logits(self, state: TrainState, batch: Batch | jax.typing.ArrayLike) -> Any:
        """What the model's `logits` gives, such as fp32 (batch, seq, vocab).

        Args:
            state: From `init` or a step.
            batch: The arrays that it reads, or the only one: tokens (batch, seq).

        Raises:
            InputError: The model has no `logits`.
        """
        if self.model.logits is None:
            raise InputError("the model has no logits function; give Model logits=")
        if not isinstance(batch, Mapping):
            batch = {next(iter(self.model.known_inputs), ""): batch}
        with jax.set_mesh(self._devices_mesh):
            placed = self._batches.place(batch, 1, partly=True)
            return self._logits(without_optimizer(state), placed)

    def compile(self, batch: Batch) -> jax.stages.Compiled:
        """The compiled step for a batch's shapes; arrays or `jax.ShapeDtypeStruct`s."""
        with jax.set_mesh(self._devices_mesh):
            return self._step.lower(*self._argument_shapes(batch)).compile()

    @property
    def gradient_program(self) -> GradientProgram:
        """Loss and gradients alone, for `meshpar.audit`."""
        return GradientProgram(self)

    def audit_subject(
        self,
        *arguments: Any,
        platform: str | None = None,
        gradients_only: bool = False,
    ) -> Subject:
        """What `meshpar.audit` compiles and explains; see there.

        Args:
            arguments: A batch, or a state and a batch; arrays or their shapes.
            platform: Kind of the absent devices, or None for the step's own.
            gradients_only: Without the optimizer (`gradient_program`).
        """
        step = self if platform is None else self._without_devices(platform)
        # JAX does not trace a jit with options of its own inside another.
        function = jax.jit(step._update, **step._update_layout)
        state, batch = step._argument_shapes(arguments[-1])
        given: tuple[Any, ...] = (state, batch)
        if gradients_only:
            function = jax.jit(step._loss_and_gradients, **step._gradients_layout)
            given = (without_optimizer(state), batch)
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
            notes=prefetch_notes(step.placement),
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

    def _without_devices(self, platform: str) -> TrainStep:
        # Those given are for the mesh's own compiler; without devices that is this one.
        is_absent = isinstance(self.mesh, AbstractMesh)
        return TrainStep(
            model=self.model_as_given,
            optimizer=self._optimizer_as_given,
            layout=self.layout,
            rules=self.rules,
            mesh=absent_mesh(self.layout),
            platform=platform,
            max_grad_norm=self._max_grad_norm,
            gradient_dtype=self._gradient_dtype,
            compiler_options=self._options_as_given if is_absent else None,
            schedule=self.schedule if self.layout.stage > 1 else None,
        )

    def _argument_shapes(self, batch: Batch) -> tuple[TrainState, Batch]:
        self._batches.check(batch)
        return self.state_shapes, batch_structs(batch)

    def _update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        check_examples_first(self.model_as_given, batch)
        apart = take_out(self.model, state)
        loss, more, gradients, model_state = self._program.loss_and_gradients(
            apart.params, apart.model_state, batch, state.step, state.seed
        )
        apart, norm = self._apply_gradients(apart, loss, gradients, model_state)
        state = put_in(self.model, apart)
        metrics = {"loss": loss, "grad_norm": norm, **more}
        return state, {**metrics, "skipped": state.skipped}

    def _loss_and_gradients(self, state: TrainState, batch: Batch) -> tuple:
        """Loss, more metrics and gradients."""
        return self._program.loss_and_gradients(*self._given(state, batch))[:3]

    def _given(self, state: TrainState, batch: Batch) -> tuple[Any, ...]:
        """What a program takes."""
        apart = take_out(self.model, state)
        return apart.params, apart.model_state, batch, state.step, state.seed

    def _first_state(self, seed: jax.Array, *, specs: Any = None) -> TrainState:
        param_dtype = self.layout.param_dtype
        return initial_state(self.model, self._optimizer, seed, param_dtype, specs)

    def _born(self, seed: jax.Array) -> TrainState:
        """The first state, each device making its own part."""
        placement = self.placement
        specs = placement.specs(attrgetter("state_spec")), placement.model_state_specs
        return put_in(self.model, self._first_state(seed, specs=specs))

    def _shardings(self) -> tuple[Params, Params, Params]:
        """The sharding of every parameter at rest, of its states, of model state."""
        at_rest, of_states = (
            self.placement.specs(attrgetter(name)) for name in ("spec", "state_spec")
        )
        on_mesh = lambda spec: NamedSharding(self.mesh, spec)  # noqa: E731
        is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
        of_model = self.placement.model_state_specs
        return tuple(
            jax.tree.map(on_mesh, specs, is_leaf=is_spec)
            for specs in (at_rest, of_states, of_model)
        )


def batch_structs(batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every array, as the devices will hold it."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(
            array.shape, jax.dtypes.canonicalize_dtype(array.dtype)
        ),
        dict(batch),
    )
