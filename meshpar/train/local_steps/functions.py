"""What local steps compute: functions of global arrays, for `jax.jit` to trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from meshpar.collectives import asked
from meshpar.model.contract import Model
from meshpar.train.constants import put_in, take_out
from meshpar.train.layer_order import LayerOrder
from meshpar.train.local_steps.state import (
    MAPPED,
    REPLICA_AXES,
    joined,
    lifted,
    lifted_order,
    lifted_sharding,
    of_replicas,
    outer_of,
    repeated,
)
from meshpar.train.optimizer_state import follow_sharding, map_states
from meshpar.train.precision import Mastered, in_full, master_values
from meshpar.train.state import TrainState, without_optimizer
from meshpar.train.step_functions import Batch, Metrics, StepFunctions


@dataclass(frozen=True, kw_only=True)
class LocalStepFunctions:
    """The functions of replicas that train by themselves, and of their average.

    Args:
        replica: Of one replica; its placement has `REPLICA_AXES` apart.
        whole: The same model under plain data parallel.
        outer_optimizer: What updates the common parameters (`optimizer.by_layer`).
    """

    replica: StepFunctions
    whole: StepFunctions
    outer_optimizer: optax.GradientTransformationExtraArgs

    @property
    def model(self) -> Model:
        """As it is arranged for its stages."""
        return self.replica.model

    @property
    def num_replicas(self) -> int:
        """Replicas of the parameters."""
        return self.replica.placement.mesh.shape[REPLICA_AXES[0]]

    @cached_property
    def state_shapes(self) -> TrainState:
        """Shape and dtype of every array of the state."""
        return jax.eval_shape(lambda: self.born(jnp.uint32(0)))

    @cached_property
    def shardings(self) -> TrainState:
        """The sharding of every array of the state."""
        outer = map_states(
            follow_sharding,
            self.replica.shardings.step,
            self._outer_shapes,
            self._apart_shapes.params,
            self.replica.of_states,
        )
        return self._lifted_beside(
            self.replica.shardings, lifted_sharding, self.replica.of_states, outer
        )

    @cached_property
    def layer_orders(self) -> TrainState:
        """Where the layers of every array of the state lie."""
        orders = take_out(self.model, self.replica.layer_orders)
        outer = map_states(
            lambda _, param, order: order,
            LayerOrder(),
            self._outer_shapes,
            self._apart_shapes.params,
            orders.params,
        )
        return self._lifted_beside(
            self.replica.layer_orders, lifted_order, orders.params, outer
        )

    def born(self, seed: jax.Array) -> TrainState:
        """The first state: all replicas start alike."""
        state = take_out(self.model, self.replica.born(seed))
        # Beside the parameters that a replica stores, which may be of fewer bits.
        start = self._start(state)
        outer = self.outer_optimizer.init(start)
        lift = repeated(self.num_replicas)
        return self._lifted_beside(state, lift, start, outer)

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Each replica's own next state, and its metrics, (replicas,) each.

        Nothing crosses `REPLICA_AXES`.
        """
        self.replica.check_examples(batch)
        apart = take_out(self.model, state)
        loss, more, gradients, found, _ = self.replica.program.loss_and_gradients(
            apart.params, apart.model_state, batch, state.step, state.seed
        )
        own, norm = jax.vmap(
            self.replica.apply_gradients,
            in_axes=(MAPPED, 0, 0, 0),
            out_axes=(MAPPED, 0),
            spmd_axis_name=REPLICA_AXES,
        )(of_replicas(apart), loss, gradients, found, counts=more["weight_sum"] != 0)
        common = outer_of(apart)
        apart = joined(own, common.start, common.outer)
        metrics = {"loss": loss, "grad_norm": norm, **more}
        return put_in(self.model, apart), {**metrics, "skipped": own.skipped}

    def sync(self, state: TrainState) -> TrainState:
        """The state after the outer optimizer's step.

        Communicates over `REPLICA_AXES`: one all-reduce of this device's part of all
        parameters in fp32, and of the model's state, which is averaged.
        """
        apart = take_out(self.model, state)
        own, common = of_replicas(apart), outer_of(apart)
        values = master_values(own.params, own.opt_state)
        gradients, model_state = self._averaged(common.start, values, own.model_state)
        with asked("optimizer"):
            # No loss is known here to all replicas.
            updates, outer = self.outer_optimizer.update(
                gradients, common.outer, common.start, value=jnp.float32(jnp.nan)
            )
        start = jax.tree.map(
            lax.with_sharding_constraint,
            optax.apply_updates(common.start, updates),
            self.replica.of_states,
        )
        own = self._restarted(own, start, model_state)
        apart = joined(own, start, outer)
        return put_in(self.model, apart)

    def agreed(self, state: TrainState) -> TrainState:
        """The common parameters as a state of `whole`, without an optimizer's.

        The model's state is the mean of the replicas' as they are.
        """
        apart = take_out(self.model, state)
        params = self.whole.apply_gradients.at_rest(apart, outer_of(apart).start)
        skipped = jnp.zeros((), jnp.int32)
        apart = dataclasses.replace(
            apart,
            params=params,
            skipped=skipped,
            model_state=jax.tree.map(_mean, apart.model_state),
        )
        return without_optimizer(put_in(self.model, apart))

    def _averaged(self, start: Any, values: Any, model_state: Any) -> tuple[Any, Any]:
        """`start` less the mean of all replicas' values, laid out as states.

        And the mean of each floating-point array of the model's state; others stay.
        """
        placement = self.replica.placement

        def local(start: Any, values: Any, state: Any) -> tuple[Any, Any]:
            moved = jax.tree.map(lambda old, new: old - new[0], start, values)
            arrays, treedef = jax.tree.flatten(state)
            at = [place for place, one in enumerate(arrays) if _is_real(one)]
            beside = [arrays[place].astype(jnp.float32) for place in at]
            with asked("outer_gradient"):
                summed = lax.psum((moved, beside), REPLICA_AXES)
            means, of_state = jax.tree.map(lambda x: x / self.num_replicas, summed)
            for place, mean in zip(at, of_state, strict=True):
                arrays[place] = mean.astype(arrays[place].dtype)
            return means, treedef.unflatten(arrays)

        specs = placement.manual_state_specs
        of_state = placement.of_replicas(placement.manual_model_state_specs)
        in_specs = specs, placement.of_replicas(specs), of_state
        averaged = placement.on_shards(local, in_specs, (specs, of_state))
        return averaged(start, values, model_state)

    def _restarted(self, own: TrainState, start: Any, model_state: Any) -> TrainState:
        """Every replica at the common parameters."""
        lift = repeated(self.num_replicas)
        opt_state = own.opt_state
        if isinstance(opt_state, Mastered):
            opt_state = Mastered(jax.tree.map(lift, start), opt_state.inner)
        return dataclasses.replace(
            own,
            params=jax.tree.map(lift, self.replica.apply_gradients.at_rest(own, start)),
            opt_state=opt_state,
            model_state=model_state,
        )

    def _start(self, state: TrainState) -> Any:
        values = master_values(state.params, state.opt_state)
        return jax.tree.map(in_full, values)

    def _lifted_beside(
        self, state: TrainState, lift: Callable[[Any], Any], start: Any, outer: Any
    ) -> TrainState:
        """A replica's state, or a tree like it, lifted, with what is common beside."""
        own = lifted(take_out(self.model, state), lift)
        return put_in(self.model, joined(own, start, outer))

    @cached_property
    def _apart_shapes(self) -> TrainState:
        return take_out(self.model, self.replica.state_shapes)

    @cached_property
    def _outer_shapes(self) -> Any:
        def outer(shapes: TrainState) -> Any:
            return self.outer_optimizer.init(self._start(shapes))

        return jax.eval_shape(outer, self._apart_shapes)


def _is_real(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _mean(array: jax.Array) -> jax.Array:
    """Of all replicas; the first one's where it counts."""
    if not _is_real(array):
        return array[0]
    return jnp.mean(array.astype(jnp.float32), 0).astype(array.dtype)
