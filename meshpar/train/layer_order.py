"""Stacked arrays of a state in the model's own order of layers, whatever the stages.

A pipeline stacks layers rank by rank, with empty places where stages are of uneven
size. What every layout can read has them first to last: a gather, array by array, whose
result stays split over the mesh; what lies in order is not touched. Whoever reads it
puts each layer at its place (`stored_arrays`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from meshpar.model.contract import Model
from meshpar.model.parameter import Parameter, is_parameter
from meshpar.parallel.remat import HOST_MEMORY
from meshpar.train.optimizer_state import map_states
from meshpar.train.state import TrainState


@dataclass(frozen=True)
class LayerOrder:
    """Where the layers of one array lie.

    Args:
        places: The layer at each place of the leading dim, -1 for a place without one;
            None for an array that has no layers or has them first to last.
        dim: The dim that they are places of.
    """

    places: tuple[int, ...] | None = None
    dim: int = 0

    @property
    def num_layers(self) -> int:
        """Layers at the places."""
        return max(self.places or ()) + 1

    @property
    def place_of_layer(self) -> tuple[int, ...]:
        """The place of each layer, first to last."""
        places = self.places or ()
        return tuple(places.index(layer) for layer in range(self.num_layers))


def layer_orders(model: Model, state: TrainState) -> TrainState:
    """A `LayerOrder` for every array of a state.

    Args:
        model: Whose parameters it has, arranged for its stages.
        state: The state or its shapes.
    """
    in_order = LayerOrder()

    params, model_state = (
        jax.tree.map(_order_of, tree, is_leaf=is_parameter)
        for tree in (model.parameters, model.state)
    )
    return TrainState(
        step=in_order,
        seed=in_order,
        skipped=in_order,
        params=params,
        opt_state=map_states(
            # All that is a parameter's has a leading dim of the places of its layers.
            lambda _, param, order: order,
            in_order,
            state.opt_state,
            state.params,
            params,
        ),
        model_state=model_state,
    )


def in_model_order(state: TrainState, orders: TrainState) -> TrainState:
    """The state with the layers of every array first to last."""

    def put_back(array: jax.Array, order: LayerOrder) -> jax.Array:
        if order.places is None:
            return array
        struct = _in_model_order(array, cast(NamedSharding, array.sharding), order)
        return _layers_at(order.place_of_layer, struct.sharding, order.dim)(array)

    return jax.tree.map(put_back, state, orders)


def copied(state: TrainState, orders: TrainState) -> TrainState:
    """What `in_model_order` gives of a state that is donated next.

    Args:
        state: From it.
        orders: For every array: those in order are the other state's own, and copied.
    """

    def copy(array: jax.Array, order: LayerOrder) -> jax.Array:
        return _copied(array.sharding)(array) if order.places is None else array

    return jax.tree.map(copy, state, orders)


def arranged_within(
    state: TrainState, orders: TrainState, shardings: TrainState
) -> TrainState:
    """Undoes `in_model_order` where the layers are not the first dim.

    Those of the first dim are read to their places.
    """

    def arrange(
        array: jax.Array, order: LayerOrder, sharding: NamedSharding
    ) -> jax.Array:
        if order.places is None or not order.dim:
            return array
        return _layers_at(order.places, sharding, order.dim)(array)

    return jax.tree.map(arrange, state, orders, shardings)


def laid_out(array: jax.Array, order: LayerOrder, sharding: NamedSharding) -> jax.Array:
    """A copy of an array with its layers first to last, every layer at its place."""
    if order.places is None:
        # Never the same buffers: what is made here is donated.
        return _copied(sharding)(jax.device_put(array, sharding))
    spread = jax.device_put(array, _divisible(sharding, array.shape, order.dim))
    return _layers_at(order.places, sharding, order.dim)(spread)


def model_order_structs(
    shapes: TrainState, shardings: TrainState, orders: TrainState
) -> TrainState:
    """Shape, dtype and sharding of every array of `in_model_order`."""
    return jax.tree.map(_in_model_order, shapes, shardings, orders)


def _order_of(parameter: Parameter) -> LayerOrder:
    if parameter.places == tuple(range(parameter.num_layers or 0)):
        return LayerOrder()
    return LayerOrder(parameter.places)


def _in_model_order(
    array: Any, sharding: NamedSharding, order: LayerOrder
) -> jax.ShapeDtypeStruct:
    shape = array.shape
    if order.places is not None:
        shape = (*shape[: order.dim], order.num_layers, *shape[order.dim + 1 :])
        sharding = _divisible(sharding, shape, order.dim)
    return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)


def _divisible(
    sharding: NamedSharding, shape: tuple[int, ...], of_layers: int
) -> NamedSharding:
    """The sharding, what splits the layers moved to a dim that divides if they do not.

    4 layers in 3 stages lie in 6 places, which three ranks can share; the layers cannot
    be shared, but the values of each layer can.
    """
    mesh = sharding.mesh
    dims = [
        (entry,) if isinstance(entry, str) else tuple(entry or ())
        for entry in (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    ]

    def divides(dim: int, axes: tuple[str, ...]) -> bool:
        return shape[dim] % math.prod(mesh.shape[axis] for axis in axes) == 0

    layers = dims[of_layers]
    if divides(of_layers, layers):
        return sharding
    dims[of_layers] = ()
    for dim in range(of_layers + 1, len(shape)):
        if divides(dim, dims[dim] + layers):
            dims[dim] += layers
            break
    return NamedSharding(
        mesh,
        PartitionSpec(*(axes or None for axes in dims)),
        memory_kind=sharding.memory_kind,
    )


@functools.lru_cache
def _copied(sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.copy, out_shardings=sharding)


@functools.lru_cache
def _layers_at(
    indices: tuple[int, ...], sharding: NamedSharding, dim: int
) -> Callable[[jax.Array], jax.Array]:
    """An array -> what lies at those indices of a dim, zeros where one is negative.

    An array in the host's memory goes through the device's, one at a time.
    """

    def layers_at(array: jax.Array) -> jax.Array:
        if sharding.memory_kind == HOST_MEMORY:
            array = jax.device_put(array, jax.memory.Space.Device)
        return array.at[(*(slice(None),) * dim, np.array(indices))].get(
            mode="fill", fill_value=0, wrap_negative_indices=False
        )

    return jax.jit(layers_at, out_shardings=sharding)
