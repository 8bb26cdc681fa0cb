"""Stacked arrays in the model's order of layers, whatever the stages; given values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from meshpar.errors import InputError, nearest
from meshpar.model.contract import Model
from meshpar.model.parameter import Parameter, Params, flat, is_parameter
from meshpar.parallel.remat import HOST_MEMORY
from meshpar.rules.sharding import insert, path_name
from meshpar.train.optimizer_state import map_states
from meshpar.train.state import TrainState, split_constants


@dataclass(frozen=True)
class LayerOrder:
    """The order of the layers of one array.

    Args:
        places: The layer at each place of a dim, -1 for a place without one; None for
            an array that has no layers or has them first to last.
        dim: The dim of layers.
    """

    places: tuple[int, ...] | None = None
    dim: int = 0

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return max(self.places or ()) + 1

    @property
    def layer_places(self) -> tuple[int, ...]:
        """The place of each layer, first to last."""
        places = self.places or ()
        return tuple(places.index(layer) for layer in range(self.num_layers))


def layer_orders(
    model: Model, state: TrainState, *, unrolled: bool = False
) -> TrainState:
    """Return a `LayerOrder` for every array of a state.

    Args:
        model: The model, arranged for its stages.
        state: The state or its shapes.
        unrolled: The optimizer's state has each layer's arrays alone, first to last.
    """
    in_order = LayerOrder()

    def order(parameter: Parameter) -> LayerOrder:
        in_place = parameter.places == tuple(range(parameter.num_layers or 0))
        return in_order if in_place else LayerOrder(parameter.places)

    params, model_state = (
        jax.tree.map(order, tree, is_leaf=is_parameter)
        for tree in (model.parameters, model.state)
    )
    return TrainState(
        step=in_order,
        seed=in_order,
        skipped=in_order,
        params=params,
        opt_state=map_states(
            # A parameter's state has the leading dim of its layers' places.
            lambda _, param, order: in_order if unrolled else order,
            in_order,
            state.opt_state,
            state.params,
            params,
        ),
        model_state=model_state,
    )


def in_model_order(state: TrainState, orders: TrainState) -> TrainState:
    """Return the state with the layers of every array first to last."""

    def put_back(array: jax.Array, order: LayerOrder) -> jax.Array:
        if order.places is None:
            return array
        struct = _in_model_order(array, cast(NamedSharding, array.sharding), order)
        return _layers_at(order.layer_places, struct.sharding, order.dim)(array)

    return jax.tree.map(put_back, state, orders)


def copied(state: TrainState, orders: TrainState) -> TrainState:
    """Return a state of `in_model_order` whose arrays are all its own.

    Args:
        state: The result of `in_model_order`, whose argument is donated next.
        orders: For every array; arrays in order are the other state's, and copied.
    """

    def copy(array: jax.Array, order: LayerOrder) -> jax.Array:
        return _copied(array.sharding)(array) if order.places is None else array

    return jax.tree.map(copy, state, orders)


def arranged_within(
    state: TrainState, orders: TrainState, shardings: TrainState
) -> TrainState:
    """Undo `in_model_order` for arrays whose layers are not the first dim.

    Layers of the first dim are read to their places.
    """

    def arrange(
        array: jax.Array, order: LayerOrder, sharding: NamedSharding
    ) -> jax.Array:
        if order.places is None or not order.dim:
            return array
        return _layers_at(order.places, sharding, order.dim)(array)

    return jax.tree.map(arrange, state, orders, shardings)


def laid_out(array: jax.Array, order: LayerOrder, sharding: NamedSharding) -> jax.Array:
    """Return a copy of an array in model order with every layer at its place."""
    if order.places is None:
        # Never the same buffers: what is made here is donated.
        return _copied(sharding)(jax.device_put(array, sharding))
    spread = jax.device_put(array, _divisible(sharding, array.shape, order.dim))
    return _layers_at(order.places, sharding, order.dim)(spread)


def model_order_structs(
    shapes: TrainState, shardings: TrainState, orders: TrainState
) -> TrainState:
    """Return shape, dtype and sharding of every array of `in_model_order`."""
    return jax.tree.map(_in_model_order, shapes, shardings, orders)


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
    """Return the sharding, with the axes of layers that do not divide on another dim.

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
    """Return a function that picks `indices` along a dim, zeros where one is negative.

    Each device takes its own from the whole dim. Left to XLA's partitioner, the gather
    ended the process in jaxlib 0.11.2 where other dims are split as well. An array in
    the host's memory goes through the device's, one at a time.
    """
    entries = [*sharding.spec, *(None,) * (dim + 1 - len(sharding.spec))]
    axes = entries[dim] or ()
    entries[dim] = None
    whole = NamedSharding(sharding.mesh, PartitionSpec(*entries))
    names = (axes,) if isinstance(axes, str) else axes
    num_parts = math.prod(sharding.mesh.shape[axis] for axis in names)
    parts = np.array(indices).reshape(num_parts, -1)

    def take(array: jax.Array) -> jax.Array:
        own = jnp.array(parts)[lax.axis_index(axes)] if axes else parts[0]
        return array.at[(*(slice(None),) * dim, own)].get(
            mode="fill", fill_value=0, wrap_negative_indices=False
        )

    def layers_at(array: jax.Array) -> jax.Array:
        if sharding.memory_kind == HOST_MEMORY:
            array = jax.device_put(array, jax.memory.Space.Device)
        return jax.shard_map(
            take, mesh=sharding.mesh, in_specs=whole.spec, out_specs=sharding.spec
        )(lax.with_sharding_constraint(array, whole))

    return jax.jit(layers_at, out_shardings=sharding)


def placed_start(
    model: Model, shardings: TrainState, params: Mapping | None, model_state: Mapping
) -> tuple[Params, Params]:
    """Return given parameters and model state, each device's part on the device.

    Args:
        model: The model, arranged for its stages.
        shardings: The sharding of every array of the step's state.
        params: All parameters as `step.init` takes them; None for drawn ones.
        model_state: The state or a part of it.

    Raises:
        InputError: The given values are not of this model.
    """
    shardings = split_constants(model, shardings)
    values = replace(shardings, params=dict(params or {}), model_state=model_state)
    given = split_constants(model, values)
    drawn = params is None
    return placed_values(
        given.params, model.parameters, shardings.params, partly=drawn
    ), placed_values(given.model_state, model.state, shardings.model_state, partly=True)


def placed_values(
    given: Mapping[str, Any],
    declared: Params,
    shardings: Params,
    *,
    partly: bool = False,
) -> Params:
    """Return given values on the devices, every layer at its place.

    Args:
        given: Nested dict of values, layers first to last.
        declared: The parameters or the state, arranged for the stages.
        shardings: The same tree, a sharding in each place.
        partly: Whether some may be missing.

    Returns:
        A tree of what was given.

    Raises:
        InputError: A path is missing or unknown, or a shape is another.
    """
    parameters, of_path = flat(declared), _by_path(shardings)
    values = _by_path(given)
    for path in values:
        if path not in parameters:
            raise InputError(
                f"the given values have {path!r}, which the model has not; "
                f"{nearest(path, parameters)}",
                key="model.unknown_parameter",
            )
    missing = parameters.keys() - values.keys()
    if missing and not partly:
        raise InputError(
            f"the given values have no {min(missing)!r}, and {len(missing)} of "
            f"{len(parameters)} are missing; give every parameter of the model",
            key="model.missing_parameter",
        )
    tree: Params = {}
    for path, value in values.items():
        array = _placed(path, value, parameters[path], of_path[path])
        insert(tree, tuple(path.split(".")), array)
    return tree


def _placed(
    path: str, value: Any, parameter: Parameter, sharding: NamedSharding
) -> jax.Array:
    wanted = parameter.shape
    if parameter.num_layers is not None:
        wanted = (parameter.num_layers, *wanted)
    shape = getattr(value, "shape", None)
    if shape is None or tuple(shape) != wanted:
        raise InputError(
            f"{path} is given with shape {shape}, but the model's is "
            f"{wanted}, layers first to last; give the values of this model",
            key="model.wrong_parameter_shape",
        )
    in_order = parameter.layer_order is None
    if isinstance(value, jax.Array):
        order = LayerOrder(None if in_order else parameter.places)
        return laid_out(value, order, sharding)
    read: dict[tuple, np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        spans = zip(index or (), parameter.stacked_shape, strict=True)
        key = tuple(one.indices(size)[:2] for one, size in spans)
        if key not in read:
            read[key] = values_at(value, key, parameter)
        return read[key]

    return jax.make_array_from_callback(
        parameter.stacked_shape, sharding, part, dtype=parameter.dtype
    )


def values_at(value: Any, spans: tuple, parameter: Parameter) -> np.ndarray:
    """Return a part of a stacked parameter; zeros at places without a layer.

    Args:
        value: The whole value, layers first to last.
        spans: First index and the one after the last, dim by dim.
        parameter: The parameter, arranged for its stages.
    """
    slices = tuple(slice(*span) for span in spans)
    if parameter.layer_order is None:
        return np.asarray(value[slices], parameter.dtype)
    places = parameter.places[slices[0]]
    sizes = (stop - start for start, stop in spans)
    found = np.zeros(tuple(sizes), parameter.dtype)
    for at, layer in enumerate(places):
        if layer >= 0:
            found[at] = value[(slice(layer, layer + 1), *slices[1:])][0]
    return found


def _by_path(tree: Any) -> dict[str, Any]:
    """Return path -> leaf of a nested dict, whatever the leaves are."""
    leaves = jax.tree.leaves_with_path(
        tree, is_leaf=lambda node: not isinstance(node, Mapping)
    )
    return {path_name(path): leaf for path, leaf in leaves}
