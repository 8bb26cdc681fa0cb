"""Local steps: replicas that train by themselves and average their parameters.

For devices whose link between the parts of `data` is slow, as between sites. Each part
holds a whole replica, with parameters and optimizer state of its own, and takes
`sync_every` = H steps on its share of each batch. Nothing crosses `data` meanwhile.
Then all take the step of an outer optimizer from where they started together, `start`:

    outer gradient = start - mean over replicas of their parameters
    start = outer optimizer(start, outer gradient)

which is one all-reduce of the parameters in fp32 in H steps, instead of one of the
gradients in each. All replicas go on from `start`; their optimizer states stay theirs.
A model's own state, of each replica's share of the batch, is averaged too.

With H = 1 a layout is plain data parallel, whose gradients are averaged before the
optimizer sees them, and there is no outer optimizer: the program is the same one. (The
formula above with H = 1 is another algorithm for any inner optimizer but SGD, whose
step is linear in the gradient; with an outer SGD of rate 1 it is then the same.)

Reference: Douillard et al. 2023, DiLoCo: Distributed Low-Communication Training of
Language Models, algorithm 1; outer optimizer of its section 3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.collectives import asked
from meshpar.layout import Layout
from meshpar.model.contract import Model
from meshpar.train.layer_order import LayerOrder
from meshpar.train.optimizer_state import (
    Mastered,
    StateSharding,
    in_full,
    inner_state,
    map_states,
    master_values,
    with_inner,
)
from meshpar.train.state import (
    TrainState,
    join_constants,
    split_constants,
    without_optimizer,
)
from meshpar.train.step_functions import Batch, Metrics, StepFunctions

REPLICA_AXES = ("data",)
"""The mesh axes along which a layout with local steps has a replica each."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WithOuter:
    """Optimizer state of replicas, and of the outer optimizer.

    Args:
        inner: State of the replicas' own optimizer, a leading dim of all of them.
        start: Parameters that all replicas last had in common, fp32.
        outer: The outer optimizer's state.
    """

    inner: Any
    start: Any
    outer: Any


def common_state(state: TrainState) -> WithOuter:
    """Return the state that the replicas have in common."""
    return inner_state(state.opt_state)


def replica_states(state: TrainState) -> TrainState:
    """Return the state that each replica has of its own."""
    inner = with_inner(state.opt_state, common_state(state).inner)
    return dataclasses.replace(state, opt_state=inner)


def joined(own: TrainState, start: Any, outer: Any) -> TrainState:
    """Undo `replica_states`, with the parameters and the outer state in common."""
    common = WithOuter(inner_state(own.opt_state), start, outer)
    opt_state = with_inner(own.opt_state, common)
    return dataclasses.replace(own, opt_state=opt_state)


def lifted(state: TrainState, lift: Callable[[Any], Any]) -> TrainState:
    """Return the state of all replicas for that of one, or for a tree like it.

    Args:
        state: The state of one replica.
        lift: Leaf of one replica -> leaf with a leading dim of all replicas.
    """
    return dataclasses.replace(
        state,
        skipped=lift(state.skipped),
        params=jax.tree.map(lift, state.params),
        opt_state=jax.tree.map(lift, state.opt_state),
        model_state=jax.tree.map(lift, state.model_state),
    )


def repeated(num_replicas: int) -> Callable[[jax.Array], jax.Array]:
    """Return the function that repeats an array for every replica."""
    return lambda array: jnp.broadcast_to(array, (num_replicas, *array.shape))


def lifted_sharding(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of an array of all replicas for that of one."""
    return NamedSharding(
        sharding.mesh,
        PartitionSpec(REPLICA_AXES, *sharding.spec),
        memory_kind=sharding.memory_kind,
    )


def lifted_order(order: LayerOrder) -> LayerOrder:
    """Return the layer order of an array of all replicas for that of one."""
    return dataclasses.replace(order, dim=order.dim + 1)


MAPPED: TrainState[int | None] = TrainState(
    step=None,
    seed=None,
    skipped=0,
    params=cast(Any, 0),
    opt_state=0,
    model_state=0,
)
"""The leading dims of `replica_states`, as `jax.vmap` takes them."""


@dataclass(frozen=True, kw_only=True)
class LocalStepFunctions:
    """The functions of replicas that train by themselves, and of their average.

    Args:
        replica: Functions of one replica, whose placement keeps `REPLICA_AXES` apart.
        whole: Functions of the same model under plain data parallel.
        outer_optimizer: Optimizer of the common parameters (`optimizer.by_layer`).
    """

    replica: StepFunctions
    whole: StepFunctions
    outer_optimizer: optax.GradientTransformationExtraArgs

    @property
    def model(self) -> Model:
        """The model arranged for its stages."""
        return self.replica.model

    @property
    def num_replicas(self) -> int:
        """Number of replicas of the parameters."""
        return self.replica.placement.mesh.shape[REPLICA_AXES[0]]

    @cached_property
    def state_shapes(self) -> TrainState:
        """Shape and dtype of every array of the state."""
        return jax.eval_shape(lambda: self.initial_state(jnp.uint32(0)))

    @cached_property
    def shardings(self) -> TrainState:
        """The sharding of every array of the state."""
        outer = StateSharding().shardings(
            self._outer_shapes,
            self._split_shapes.params,
            self.replica.gradient_shardings,
            self.replica.has_layers,
        )
        return self._with_common(
            self.replica.shardings,
            lifted_sharding,
            self.replica.gradient_shardings,
            outer,
        )

    @cached_property
    def layer_orders(self) -> TrainState:
        """A `LayerOrder` for every array of the state."""
        orders = split_constants(self.model, self.replica.layer_orders)
        outer = map_states(
            lambda _, param, order: order,
            LayerOrder(),
            self._outer_shapes,
            self._split_shapes.params,
            orders.params,
        )
        return self._with_common(
            self.replica.layer_orders, lifted_order, orders.params, outer
        )

    def initial_state(self, seed: jax.Array) -> TrainState:
        """Return the first state, in which all replicas are equal."""
        state = split_constants(self.model, self.replica.initial_state(seed))
        start = self._start(state)
        outer = self.outer_optimizer.init(start)
        lift = repeated(self.num_replicas)
        return self._with_common(state, lift, start, outer)

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Return each replica's next state, and its metrics, (replicas,) each.

        It communicates nothing over `REPLICA_AXES`.
        """
        self.replica.check_examples(batch)
        state = split_constants(self.model, state)
        loss, more, gradients, found, _ = self.replica.program.loss_and_gradients(
            state.params, state.model_state, batch, state.step, state.seed
        )
        own, norm = jax.vmap(
            self.replica.apply_gradients,
            in_axes=(MAPPED, 0, 0, 0),
            out_axes=(MAPPED, 0),
            spmd_axis_name=REPLICA_AXES,
        )(replica_states(state), loss, gradients, found, counts=more["weight_sum"] != 0)
        common = common_state(state)
        state = joined(own, common.start, common.outer)
        metrics = {"loss": loss, "grad_norm": norm, **more}
        return join_constants(self.model, state), {**metrics, "skipped": own.skipped}

    def sync(self, state: TrainState) -> TrainState:
        """Return the state after the outer optimizer's step.

        Communicates over `REPLICA_AXES`: one all-reduce of this device's part of all
        parameters in fp32, and of the model's state, which is averaged.
        """
        state = split_constants(self.model, state)
        own, common = replica_states(state), common_state(state)
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
            self.replica.gradient_shardings,
        )
        own = self._restarted(own, start, model_state)
        state = joined(own, start, outer)
        return join_constants(self.model, state)

    def common_reading_state(self, state: TrainState) -> TrainState:
        """Return a state of `whole` with the common parameters, and no optimizer state.

        Its model state is the mean of the replicas'.
        """
        state = split_constants(self.model, state)
        params = self.whole.at_rest(state, common_state(state).start)
        skipped = jnp.zeros((), jnp.int32)
        state = dataclasses.replace(
            state,
            params=params,
            skipped=skipped,
            model_state=jax.tree.map(_mean, state.model_state),
        )
        return without_optimizer(join_constants(self.model, state))

    def _averaged(self, start: Any, values: Any, model_state: Any) -> tuple[Any, Any]:
        """Return `start` less the mean of the replicas' values, sharded as states.

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

        specs = placement.manual_specs
        of_state = placement.replica_specs(placement.manual_model_state_specs)
        in_specs = specs, placement.replica_specs(specs), of_state
        averaged = placement.on_shards(local, in_specs, (specs, of_state))
        return averaged(start, values, model_state)

    def _restarted(self, own: TrainState, start: Any, model_state: Any) -> TrainState:
        """Return the replicas' state at the common parameters."""
        lift = repeated(self.num_replicas)
        opt_state = own.opt_state
        if isinstance(opt_state, Mastered):
            opt_state = Mastered(jax.tree.map(lift, start), opt_state.inner)
        return dataclasses.replace(
            own,
            params=jax.tree.map(lift, self.replica.at_rest(own, start)),
            opt_state=opt_state,
            model_state=model_state,
        )

    def _start(self, state: TrainState) -> Any:
        values = master_values(state.params, state.opt_state)
        return jax.tree.map(in_full, values)

    def _with_common(
        self, state: TrainState, lift: Callable[[Any], Any], start: Any, outer: Any
    ) -> TrainState:
        """Return the state of all replicas for that of one and the common state."""
        own = lifted(split_constants(self.model, state), lift)
        return join_constants(self.model, joined(own, start, outer))

    @cached_property
    def _split_shapes(self) -> TrainState:
        return split_constants(self.model, self.replica.state_shapes)

    @cached_property
    def _outer_shapes(self) -> Any:
        def outer(shapes: TrainState) -> Any:
            return self.outer_optimizer.init(self._start(shapes))

        return jax.eval_shape(outer, self._split_shapes)


def _is_real(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _mean(array: jax.Array) -> jax.Array:
    """Return the mean over replicas; the first one's value of a counter."""
    if not _is_real(array):
        return array[0]
    return jnp.mean(array.astype(jnp.float32), 0).astype(array.dtype)


@dataclass(frozen=True, kw_only=True)
class SyncPrograms:
    """The average of replicas; nothing is compiled before its first call.

    Args:
        functions: The functions that they compute.
        compiler_options: XLA's options for every program.
    """

    functions: LocalStepFunctions
    compiler_options: dict[str, Any]

    @cached_property
    def sync(self) -> Any:
        """State -> the state after the outer optimizer's step; it is donated."""
        shardings = self.functions.shardings
        return jax.jit(
            self.functions.sync,
            in_shardings=(shardings,),
            out_shardings=shardings,
            donate_argnums=0,
            compiler_options=self.compiler_options,
        )

    @cached_property
    def common_reading_state(self) -> Any:
        """State -> state for programs that update nothing."""
        return jax.jit(
            self.functions.common_reading_state,
            in_shardings=(self.functions.shardings,),
            out_shardings=without_optimizer(self.functions.whole.shardings),
            compiler_options=self.compiler_options,
        )


def sync_notes(functions: LocalStepFunctions, layout: Layout) -> tuple[str, ...]:
    """Return notes for the audit of a local step: the cost of the average."""
    shapes = common_state(functions.state_shapes).start
    parts = jax.tree.map(
        lambda shape, sharding: math.prod(sharding.shard_shape(shape.shape)),
        shapes,
        functions.replica.gradient_shardings,
    )
    num_bytes = 4 * sum(jax.tree.leaves(parts))
    return (
        f"sync_every={layout.sync_every}: nothing of this program crosses 'data'; "
        f"after every {layout.sync_every} steps another all-reduces {num_bytes:,} "
        "bytes of each device there (step.sync_program)",
    )


class StepCount:
    """The number of steps of a state, without waiting for the last one noted.

    For any other state the number is read, which waits until the device has made it, so
    that steps are no longer dispatched ahead.
    """

    def __init__(self) -> None:
        self._noted: Any = None
        self._steps = 0

    def steps(self, state: TrainState) -> int:
        """Return the number of steps that a state has done."""
        return self._steps if state.step is self._noted else int(state.step)

    def note(self, state: TrainState, steps: int) -> None:
        """Note the number of steps of a state."""
        self._noted, self._steps = state.step, steps


LEARNING_RATE = 0.7
MOMENTUM = 0.9
"""Douillard et al. 2023, section 3: the best of those tried for Nesterov momentum."""


def nesterov(
    learning_rate: float = LEARNING_RATE, momentum: float = MOMENTUM
) -> optax.GradientTransformation:
    """Return SGD with Nesterov momentum (Sutskever et al. 2013)."""
    return optax.sgd(learning_rate, momentum=momentum, nesterov=True)
