"""Functions of a training step on global arrays, from which programs are traced."""

from __future__ import annotations

import warnings
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass, replace
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
from meshpar.model.parameter import Params, is_parameter
from meshpar.parallel.placement import Placement
from meshpar.parallel.reduction import global_norm, safe_inverse, scaled, term_means
from meshpar.train.layer_order import layer_orders
from meshpar.train.optimizer_state import (
    StateSharding,
    in_full,
    inner_state,
    master_values,
    stored,
    whole_states,
    with_inner,
)
from meshpar.train.state import (
    TrainState,
    in_memory,
    initial_state,
    join_constants,
    split_constants,
)

Batch = Mapping[str, Any]
Metrics = dict[str, jax.Array]

_ROUNDING = 0x50
"""Tells the keys of random rounding from those of dropout."""


class Evaluation:
    """Metrics by name: `loss`, `loss_sum`, `weight_sum`, and what the head names.

    It is read as a dict: `evaluation["loss"]`, `.items()`, `dict(evaluation)`,
    `"accuracy" in evaluation`. For one release it can be read as the pair (loss_sum,
    weight_sum) too, by unpacking or by number, with a warning; then it is a dict.

    Example:
        >>> evaluation = Evaluation({"loss": 2.0, "loss_sum": 8.0, "weight_sum": 4.0})
        >>> evaluation["loss"], "accuracy" in evaluation
        (2.0, False)
        >>> {**evaluation}
        {'loss': 2.0, 'loss_sum': 8.0, 'weight_sum': 4.0}
    """

    def __init__(self, metrics: dict[str, Any]) -> None:
        self._metrics = metrics

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self._metrics.keys()

    def values(self) -> ValuesView[Any]:
        """Return the metrics, in the order of their names."""
        return self._metrics.values()

    def items(self) -> ItemsView[str, Any]:
        """Return pairs of name and metric."""
        return self._metrics.items()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a metric, or the default."""
        return self._metrics.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._metrics

    def __len__(self) -> int:
        return len(self._metrics)

    def __repr__(self) -> str:
        return f"Evaluation({self._metrics})"

    def __getitem__(self, name: str | int) -> Any:
        return self._metrics[name] if isinstance(name, str) else self._pair()[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pair())

    def _pair(self) -> tuple[Any, Any]:
        warnings.warn(
            "evaluate returns metrics by name; take evaluation['loss_sum'] and "
            "evaluation['weight_sum'], or evaluation['loss'] for the mean",
            DeprecationWarning,
            stacklevel=3,
        )
        return self._metrics["loss_sum"], self._metrics["weight_sum"]


jax.tree_util.register_pytree_node(
    Evaluation,
    lambda one: (tuple(one.values()), tuple(one.keys())),
    lambda names, values: Evaluation(dict(zip(names, values, strict=True))),
)


@dataclass(frozen=True, kw_only=True)
class StepFunctions:
    """The functions of one step, and the shapes and shardings of their state.

    Args:
        model_as_given: The model before it was arranged for its stages.
        placement: Specs of every parameter, gradient and state.
        program: Loss and gradients: a `LocalProgram` or the pipeline's program.
        optimizer: Optimizer of the stacked parameters (`optimizer.by_layer`).
        max_grad_norm: Gradients are scaled down to this global norm; None for none.
        state_sharding: Rule by which optimizer state is sharded.
        check: Whether a model that may join examples is refused.
    """

    model_as_given: Model
    placement: Placement
    program: Any
    optimizer: optax.GradientTransformationExtraArgs
    max_grad_norm: float | None
    state_sharding: StateSharding = StateSharding()
    check: bool = True

    @property
    def model(self) -> Model:
        """The model arranged for its stages."""
        return self.placement.model

    @cached_property
    def state_shapes(self) -> TrainState:
        """Shape and dtype of every array of the state."""
        return join_constants(self.model, self._split_shapes)

    @cached_property
    def layer_orders(self) -> TrainState:
        """A `LayerOrder` for every array of the state."""
        orders = layer_orders(
            self.model, self._split_shapes, unrolled=self.state_sharding.unrolled
        )
        return join_constants(self.model, orders)

    @cached_property
    def shardings(self) -> TrainState:
        """The sharding of every array of the state."""
        shapes, layout = self._split_shapes, self.placement.layout
        gradients = self.gradient_shardings
        inner = self.state_sharding.shardings(
            inner_state(shapes.opt_state), shapes.params, gradients, self.has_layers
        )
        whole = NamedSharding(self.placement.mesh, PartitionSpec())
        opt_state = with_inner(shapes.opt_state, inner, gradients)
        shardings = TrainState(
            step=whole,
            seed=whole,
            skipped=whole,
            params=gradients,
            opt_state=in_memory(layout.optimizer_memory, opt_state),
            model_state=self._shardings(self.placement.model_state_specs),
        )
        return join_constants(self.model, shardings)

    @cached_property
    def gradient_shardings(self) -> Params:
        """The sharding of each parameter, its gradient and its optimizer state."""
        return self._shardings(self.placement.specs(attrgetter("spec")))

    def whole_states(self) -> Iterator[tuple[str, int]]:
        """Yield path and bytes of large optimizer state that no device shares."""
        shapes = self._split_shapes
        yield from whole_states(
            shapes.opt_state,
            self.shardings.opt_state,
            shapes.params,
            self.gradient_shardings,
        )

    def initial_state(
        self, seed: jax.Array, given: tuple[Params, Params] = ({}, {})
    ) -> TrainState:
        """Return the first state, each device making its own part.

        Args:
            seed: Seed of the run.
            given: Parameters and state in place of those that would be drawn.
        """
        placement = self.placement
        specs = placement.specs(attrgetter("spec")), placement.model_state_specs
        state = self._initial(seed, specs=specs, given=given)
        return join_constants(self.model, state)

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Return the next state, and scalars."""
        return self.update_and_inputs(state, batch)[:2]

    def update_and_inputs(
        self, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Metrics, Batch]:
        """Return the results of `update`, and the gradient of each input with one."""
        self.check_examples(batch)
        state = split_constants(self.model, state)
        loss, more, gradients, model_state, of_inputs = self.program.loss_and_gradients(
            state.params, state.model_state, batch, state.step, state.seed
        )
        counts: Any = more["weight_sum"] != 0
        if of_inputs:  # One all-reduce of a number.
            mesh = self.placement.mesh
            examples = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
            norm = global_norm(of_inputs, dict.fromkeys(of_inputs, examples), mesh)
            counts &= jnp.isfinite(norm)
        state, norm = self.apply_gradients(
            state, loss, gradients, model_state, counts=counts
        )
        state = join_constants(self.model, state)
        metrics = {"loss": loss, "grad_norm": norm, **more}
        return state, {**metrics, "skipped": state.skipped}, of_inputs

    def loss_and_gradients(self, state: TrainState, batch: Batch) -> tuple:
        """Return loss, more metrics and gradients."""
        self._check_examples_apart(batch)
        return self.program.loss_and_gradients(*self._arguments(state, batch))[:3]

    def evaluated(self, state: TrainState, batch: Batch) -> Any:
        """Return `loss`, `loss_sum`, `weight_sum` and the head's terms, by name.

        Without dropout and auxiliary losses.
        """
        self._check_examples_apart(batch)
        sums = self.program.loss_sums(*self._arguments(state, batch))
        loss = sums.loss * safe_inverse(sums.weight)
        metrics = {"loss": loss, "loss_sum": sums.loss, "weight_sum": sums.weight}
        return {**metrics, **term_means(sums.terms)}

    def logits(self, state: TrainState, batch: Batch) -> Any:
        """Return the model's `logits`."""
        placement, model = self.placement, self.model_as_given
        layout = placement.layout
        check_logits_tokens(model, layout, placement.rules, tuple(batch))
        if self.check and layout.batch_shards * layout.stage > 1:
            check_examples_apart(model, batch, str(layout), logits=True)
        return self.program.logits(*self._arguments(state, batch))

    def check_examples(self, batch: Batch) -> None:
        """Refuse a model that takes the examples of a batch otherwise than layouts do.

        Raises:
            InputError: It joins examples, or has them in another dim than the first.
        """
        check_examples_first(self.model_as_given, batch)
        self._check_examples_apart(batch)

    def apply_gradients(
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
            self.gradient_shardings,
            placement.mesh,
            replica_axes=placement.replica_axes,
        )
        if placement.layout.optimizer_memory != "device":
            moved = jax.device_put(state.opt_state, jax.memory.Space.Device)
            state = replace(state, opt_state=moved)
        counts = jnp.isfinite(norm) & jnp.isfinite(loss) & counts
        if self.max_grad_norm is not None:
            scale = jnp.minimum(1.0, self.max_grad_norm / (norm + 1e-6))
            gradients = scaled(gradients, scale, jnp.float32)
        values = jax.tree.map(
            lax.with_sharding_constraint,
            master_values(state.params, state.opt_state),
            self.gradient_shardings,
        )
        new_values, new_opt_state = self._optimized(state, values, gradients, loss)
        keep = lambda new, old: jnp.where(counts, new, old)  # noqa: E731
        new_state = replace(
            state,
            step=state.step + 1,
            skipped=state.skipped + jnp.where(counts, 0, 1),
            params=self.at_rest(state, jax.tree.map(keep, new_values, values)),
            opt_state=jax.tree.map(keep, new_opt_state, state.opt_state),
            model_state=jax.tree.map(keep, model_state, state.model_state),
        )
        return new_state, norm

    def _optimized(
        self, state: TrainState, values: Any, gradients: Any, loss: jax.Array
    ) -> tuple[Any, Any]:
        """Return fp32 parameters and the optimizer's state after its update."""
        with asked("optimizer"):
            updates, inner = self.optimizer.update(
                jax.tree.map(in_full, gradients),
                inner_state(state.opt_state),
                values,
                value=loss,
            )
        new_values = optax.apply_updates(values, updates)
        return new_values, with_inner(state.opt_state, inner, new_values)

    def at_rest(self, state: TrainState, values: Any) -> Any:
        """Return parameters as stored between steps, rounded if the layout rounds.

        Args:
            state: Random rounding derives from its seed and step.
            values: fp32, sharded as states.
        """
        key = jax.random.fold_in(jax.random.key(state.seed), jnp.uint32(_ROUNDING))
        return stored(
            values,
            self.placement.layout.param_dtype,
            self.model,
            jax.random.fold_in(key, state.step),
        )

    @cached_property
    def _split_shapes(self) -> TrainState:
        """Shapes of the state, its constants among the model's state."""
        return jax.eval_shape(lambda: self._initial(jnp.uint32(0)))

    @property
    def has_layers(self) -> Params:
        """For each parameter whether its first dim is one of layers."""
        return jax.tree.map(
            lambda one: one.num_layers is not None,
            self.model.parameters,
            is_leaf=is_parameter,
        )

    def _check_examples_apart(self, batch: Batch) -> None:
        layout = self.placement.layout
        parts = layout.batch_shards * layout.microbatches * layout.stage
        if self.check and parts > 1:
            check_examples_apart(self.model_as_given, batch, str(layout))

    def _arguments(self, state: TrainState, batch: Batch) -> tuple[Any, ...]:
        """Return the arguments of a function of `program`."""
        state = split_constants(self.model, state)
        return state.params, state.model_state, batch, state.step, state.seed

    def _initial(self, seed: jax.Array, **more: Any) -> TrainState:
        param_dtype = self.placement.layout.param_dtype
        return initial_state(self.model, self.optimizer, seed, param_dtype, **more)

    def _shardings(self, specs: Any) -> Params:
        return jax.tree.map(
            lambda spec: NamedSharding(self.placement.mesh, spec), specs
        )
