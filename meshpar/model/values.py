"""Initial values: functions of (seed, group, layer), whatever the layout.

A module is built once for all its parameters, from the key that a Flax user would give
it: `initial_key(seed, group, layer)`.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from meshpar.model.building import build_layers, build_one
from meshpar.model.parameter import Parameter, Params, is_parameter
from meshpar.rules.sharding import path_name

if TYPE_CHECKING:
    from meshpar.model.contract import Model

ENDS = "ends"
"""What stands for the parameters outside the blocks, where a group's name does."""


def initial_key(
    seed: jax.Array | int, group: str, layer: jax.Array | int | None = None
) -> jax.Array:
    """The key that one block, or the ends, start from.

        key = fold_in(fold_in(key(seed), crc32(group)), layer)

    Args:
        seed: Of the run.
        group: Name of the group of blocks, or `ends`.
        layer: Of that group, counted from 0; None for the ends.

    Example:
        >>> from flax import nnx
        >>> key = initial_key(0, "blocks", layer=1)
        >>> nnx.Linear(2, 2, rngs=nnx.Rngs(key)).kernel.shape
        (2, 2)
    """
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(group.encode()))
    if layer is None:
        return key
    return jax.random.fold_in(key, jnp.asarray(layer).astype(jnp.uint32))


Specs = tuple[Params, Params]
"""Trees of `PartitionSpec` beside parameters and state."""


def initial_values(
    model: Model, seed: jax.Array | int, specs: Specs | None = None
) -> tuple[Params, Params]:
    """Parameters and state before the first step, stacked as the model lies.

    Args:
        model: The model, arranged for stages or not.
        seed: Of the run.
        specs: How they lie over the mesh that is set; None without one.
    """
    params: Params = {}
    state: Params = {}
    for group in model.groups:
        name = group.name
        params[name], state[name] = _of_group(model, name, seed, specs)
    built: tuple[Params, Params] = ({}, {})
    if ENDS in model.build:
        of_ends = specs and (model.split(specs[0])[0], model.split(specs[1])[0])
        built = build_one(model.build[ENDS], initial_key(seed, ENDS), of_ends)
    params |= _drawn(model.split(model.parameters)[0], built[0], seed, ())
    state |= _drawn(model.split(model.state)[0], built[1], seed, ())
    return _in_order_of(model.parameters, params), _in_order_of(model.state, state)


def _of_group(
    model: Model, name: str, seed: jax.Array | int, specs: Specs | None
) -> tuple[Params, Params]:
    """A group's parameters and state, (places, ...) each."""
    trees = model.parameters[name], model.state.get(name, {})
    built: tuple[Params, Params] = ({}, {})
    if name in model.build:
        leaves = jax.tree.leaves(trees, is_leaf=is_parameter)
        order = jnp.asarray(leaves[0].places)
        keys = jax.vmap(lambda layer: initial_key(seed, name, layer))(order)
        of_group = specs and (specs[0].get(name, {}), specs[1].get(name, {}))
        built = build_layers(model.build[name], keys, of_group)
    at = (jax.tree_util.DictKey(name),)
    params, state = (
        _drawn(tree, values, seed, at)
        for tree, values in zip(trees, built, strict=True)
    )
    return params, state


def _drawn(tree: Params, built: Params, seed: jax.Array | int, at: tuple) -> Params:
    """Values of a tree: those that were built, and the others each from its own key."""
    leaves = jax.tree.leaves_with_path(built)
    known = {path_name((*at, *path)): value for path, value in leaves}

    def value(path: tuple, parameter: Parameter) -> Any:
        name = path_name((*at, *path))
        if name in known:
            return _without_empty(known[name].astype(parameter.dtype), parameter)
        return _of_its_own(name, parameter, seed)

    return jax.tree.map_with_path(value, tree, is_leaf=is_parameter)


def _of_its_own(path: str, parameter: Parameter, seed: jax.Array | int) -> jax.Array:
    if parameter.initial is None:
        raise KeyError(f"{path} has no initial value, and no build gives one")
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
    if parameter.num_layers is None:
        return parameter.initial(key).astype(parameter.dtype)
    layers = jnp.asarray(parameter.places, jnp.int32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, layers.astype(jnp.uint32))
    values = jax.vmap(parameter.initial)(keys).astype(parameter.dtype)
    return _without_empty(values, parameter)


def _without_empty(values: jax.Array, parameter: Parameter) -> jax.Array:
    """Zeros at the places that hold no layer."""
    order = parameter.layer_order
    if order is None or min(order) >= 0:
        return values
    filled = (jnp.asarray(order) >= 0).reshape(-1, *(1,) * len(parameter.shape))
    return jnp.where(filled, values, jnp.zeros((), values.dtype))


def _in_order_of(tree: Params, values: Params) -> Params:
    """The values under the keys that the tree has, in its order."""
    return {name: values[name] for name in tree}
