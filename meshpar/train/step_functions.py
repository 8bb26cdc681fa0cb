"""Functions of a training step on global arrays, for jax.jit to trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.checks.examples import check_examples_apart, check_examples_first
from meshpar.checks.sequences import check_logits_tokens
from meshpar.collectives import asked
from meshpar.layout import BATCH_AXES
from meshpar.model.contract import Model
from meshpar.model.parameter import Params
from meshpar.parallel.placement import Placement
from meshpar.parallel.reduction import global_norm, scaled
from meshpar.train.layer_order import layer_orders
from meshpar.train.optimizer_state import (
    in_full,
    inner_state,
    master_values,
    stored,
    with_updated,
)
from meshpar.train.state import (
    TrainState,
    initial_state,
    put_in,
    state_shardings,
    take_out,
)

Batch = Mapping[str, Any]
Metrics = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class StepFunctions:
    """The functions of one step, and the shapes and shardings of their state.

    Args:
        model_as_given: The model before it was arranged for its stages.
        placement: Where every parameter, gradient and state lies.
        program: What computes loss and gradients: `LocalProgram` or the pipeline's.
        optimizer: What updates the stacked parameters (`optimizer.by_layer`).
        max_grad_norm: Global norm that gradients are scaled down to; None for none.
        check: Whether a model that may join examples is refused.
    """

    model_as_given: Model
    placement: Placement
    program: Any
    optimizer: optax.GradientTransformationExtraArgs
    max_grad_norm: float | None
    check: bool = True

    @property
    def model(self) -> Model:
        """As it is arranged for its stages."""
        return self.placement.model

    @cached_property
    def state_shapes(self) -> TrainState:
        """Shape and dtype of every array of the state."""
        return put_in(self.model, self._shapes_apart)

    @cached_property
    def layer_orders(self) -> TrainState:
        """Where the layers of every array of the state lie."""
        return put_in(self.model, layer_orders(self.model, self._shapes_apart))

    @cached_property
    def shardings(self) -> TrainState:
        """The sharding of every array of the state."""
        at_rest = self._shardings_of(self.placement.specs(attrgetter("spec")))
        of_model = self._shardings_of(self.placement.model_state_specs)
        memory = self.placement.layout.optimizer_memory
        return put_in(
            self.model,
            state_shardings(
                self._shapes_apart, at_rest, self.of_states, of_model, memory
            ),
        )

    @cached_property
    def of_states(self) -> Params:
        """The sharding of each parameter's gradient and optimizer state."""
        return self._shardings_of(self.placement.specs(attrgetter("state_spec")))

    def born(
        self, seed: jax.Array, given: tuple[Params, Params] = ({}, {})
    ) -> TrainState:
        """The first state, each device making its own part.

        Args:
            seed: Of the run.
            given: Parameters and state in place of those that would be drawn.
        """
        placement = self.placement
        specs = placement.specs(attrgetter("state_spec")), placement.model_state_specs
        state = self._first_state(seed, specs=specs, given=given)
        return put_in(self.model, state)

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The next state, and scalars."""
        return self.update_and_inputs(state, batch)[:2]

    def update_and_inputs(
        self, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Metrics, Batch]:
        """`update`, and the gradient of each input that has one."""
        self.check_examples(batch)
        apart = take_out(self.model, state)
        loss, more, gradients, model_state, of_inputs = self.program.loss_and_gradients(
            apart.params, apart.model_state, batch, state.step, state.seed
        )
        counts = self._all_finite(of_inputs) & (more["weight_sum"] != 0)
        apart, norm = self.apply_gradients(
            apart, loss, gradients, model_state, counts=counts
        )
        state = put_in(self.model, apart)
        metrics = {"loss": loss, "grad_norm": norm, **more}
        return state, {**metrics, "skipped": state.skipped}, of_inputs

    def check_examples(self, batch: Batch) -> None:
        """Refuse a model that takes the examples of a batch otherwise than layouts do.

        Raises:
            InputError: It joins examples, or has them in another dim than the first.
        """
        check_examples_first(self.model_as_given, batch)
        self._check_examples_apart(batch)

    def loss_and_gradients(self, state: TrainState, batch: Batch) -> tuple:
        """Loss, more metrics and gradients."""
        self._check_examples_apart(batch)
        return self.program.loss_and_gradients(*self._given(state, batch))[:3]

    def evaluated(self, state: TrainState, batch: Batch) -> Any:
        """Summed loss and weights, without dropout and auxiliary losses."""
        self._check_examples_apart(batch)
        return self.program.loss_sums(*self._given(state, batch))

    def logits(self, state: TrainState, batch: Batch) -> Any:
        """What the model's `logits` gives."""
        self._check_logits(batch)
        return self.program.logits(*self._given(state, batch))

    @cached_property
    def _shapes_apart(self) -> TrainState:
        return jax.eval_shape(lambda: self._first_state(jnp.uint32(0)))

    @cached_property
    def apply_gradients(self) -> Update:
        """(state, loss, gradients, model state) -> the next state, and their norm."""
        return Update(
            placement=self.placement,
            optimizer=self.optimizer,
            max_grad_norm=self.max_grad_norm,
            of_states=self.of_states,
        )

    def _all_finite(self, of_inputs: Batch) -> jax.Array | bool:
        """Whether the inputs' gradients are: one all-reduce of a number, if any."""
        if not of_inputs:
            return True
        mesh = self.placement.mesh
        lie = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        return jnp.isfinite(global_norm(of_inputs, dict.fromkeys(of_inputs, lie), mesh))

    def _check_examples_apart(self, batch: Batch) -> None:
        layout = self.placement.layout
        parts = layout.batch_shards * layout.microbatches * layout.stage
        if self.check and parts > 1:
            check_examples_apart(self.model_as_given, batch, str(layout))

    def _check_logits(self, batch: Batch) -> None:
        placement, model = self.placement, self.model_as_given
        layout = placement.layout
        check_logits_tokens(model, layout, placement.rules, tuple(batch))
        if self.check and layout.batch_shards * layout.stage > 1:
            check_examples_apart(model, batch, str(layout), logits=True)

    def _given(self, state: TrainState, batch: Batch) -> tuple[Any, ...]:
        """What a program takes."""
        apart = take_out(self.model, state)
        return apart.params, apart.model_state, batch, state.step, state.seed

    def _first_state(self, seed: jax.Array, **more: Any) -> TrainState:
        param_dtype = self.placement.layout.param_dtype
        return initial_state(self.model, self.optimizer, seed, param_dtype, **more)

    def _shardings_of(self, specs: Any) -> Params:
        return jax.tree.map(
            lambda spec: NamedSharding(self.placement.mesh, spec), specs
        )


_ROUNDING = 0x50
"""Tells the keys of random rounding from those of dropout."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a step does with its gradients.

    Args:
        placement: Where parameters, gradients and states lie.
        optimizer: What updates the stacked parameters (`optimizer.by_layer`).
        max_grad_norm: Gradients are scaled down to this global norm; None for none.
        of_states: Sharding of each parameter's gradient and optimizer state.
    """

    placement: Placement
    optimizer: optax.GradientTransformationExtraArgs
    max_grad_norm: float | None
    of_states: Any

    def __call__(
        self,
        state: TrainState,
        loss: jax.Array,
        gradients: Any,
        model_state: Any,
        *,
        counts: jax.Array | bool = True,
    ) -> tuple[TrainState, jax.Array]:
        """Return the next state, and the global norm of the gradients before scaling.

        Where loss or norm is not finite, or `counts` is false, parameters and optimizer
        state stay as they are and `skipped` counts one more.
        """
        placement = self.placement
        norm = global_norm(
            gradients,
            self.of_states,
            placement.mesh,
            replica_axes=placement.replica_axes,
        )
        state = self._on_device(state)
        counts = jnp.isfinite(norm) & jnp.isfinite(loss) & counts
        if self.max_grad_norm is not None:
            scale = jnp.minimum(1.0, self.max_grad_norm / (norm + 1e-6))
            gradients = scaled(gradients, scale, jnp.float32)
        values = jax.tree.map(
            lax.with_sharding_constraint,
            master_values(state.params, state.opt_state),
            self.of_states,
        )
        new_values, new_opt_state = self._updated(
            values, gradients, state.opt_state, loss
        )
        keep = lambda new, old: jnp.where(counts, new, old)  # noqa: E731
        new_state = dataclasses.replace(
            state,
            step=state.step + 1,
            skipped=state.skipped + jnp.where(counts, 0, 1),
            params=self.at_rest(state, jax.tree.map(keep, new_values, values)),
            opt_state=jax.tree.map(keep, new_opt_state, state.opt_state),
            model_state=jax.tree.map(keep, model_state, state.model_state),
        )
        return new_state, norm

    def at_rest(self, state: TrainState, values: Any) -> Any:
        """Values of parameters as they lie between steps, rounded if they are to be.

        Args:
            state: Its seed and step are what random rounding derives from.
            values: fp32, laid out as states.
        """
        placement = self.placement
        key = jax.random.fold_in(jax.random.key(state.seed), jnp.uint32(_ROUNDING))
        return placement.at_rest(
            stored(
                values,
                placement.layout.param_dtype,
                placement.model,
                jax.random.fold_in(key, state.step),
            )
        )

    def _on_device(self, state: TrainState) -> TrainState:
        if self.placement.layout.optimizer_memory == "device":
            return state
        moved = jax.device_put(state.opt_state, jax.memory.Space.Device)
        return dataclasses.replace(state, opt_state=moved)

    def _updated(
        self, values: Any, gradients: Any, opt_state: Any, loss: jax.Array
    ) -> tuple[Any, Any]:
        gradients = jax.tree.map(in_full, gradients)
        with asked("optimizer"):
            updates, inner = self.optimizer.update(
                gradients, inner_state(opt_state), values, value=loss
            )
        values = optax.apply_updates(values, updates)
        return values, with_updated(opt_state, inner, values)
