"""Whether an optimizer updates the layers alike, however a pipeline stacks them.

Stages of uneven size are padded with places of zeros. They enter a mean over a stacked
array, such as the root mean square of Adafactor's updates: every layer would be updated
as in another model. What an optimizer does is its own function of arrays, so a few of
its steps are compared on small arrays: layers first to last, and as the stages hold
them.
Reference: Shazeer and Stern 2018, section 6 (Adafactor's update clipping).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.model.contract import Model
from meshpar.model.parameter import Parameter, Params, is_parameter
from meshpar.rules.sharding import path_name

_LARGEST_DIM = 129
"""Of a probe's arrays: one more than where optax begins to factor second moments."""

_MOST_VALUES = 2**21
"""Of all of a probe's arrays together: 8 MiB in fp32, of which some ten are alive."""

_MAGNITUDES = (1.0, 1e-2, 1e2)
"""Of the gradients, in turn: a limit on updates shows above it only."""

_MOST_STEPS = 64
"""Until that many updates are not zero: warm-ups start at 0, accumulation waits."""

_BOUND = 1e-4
"""Relative Frobenius error that sums in another order stay below in fp32; one empty
place among 100 moves a root mean square by 5e-3."""


def refuse_dependence_on_places(
    optimizer: optax.GradientTransformation,
    model: Model,
    layout: Layout,
    compiler_options: Mapping[str, Any] | None = None,
) -> None:
    """Refuses an optimizer whose updates depend on where a pipeline puts the layers.

    An optimizer that cannot run on arrays of other sizes than the model's is left.

    Args:
        optimizer: The optimizer.
        model: Arranged for its stages.
        layout: Whose they are, for the message.
        compiler_options: XLA's options for the default devices.

    Raises:
        InputError: They do; with the parameter that differs most, and by how much.
    """
    if all(_in_order(parameter) for parameter in model.flat_parameters().values()):
        return
    try:
        errors = _errors(optimizer, model.parameters, compiler_options)
    except (TypeError, ValueError):
        return
    worst = max(errors, key=errors.__getitem__)
    if errors[worst] <= _BOUND:
        return
    raise InputError(
        f"layout {str(layout)!r} stacks layers rank by rank, {_places(model, worst)}, "
        f"and the optimizer updates {worst} differently for it, by "
        f"{100 * errors[worst]:.2g} %: it takes a mean or a norm over the stacked "
        "array, or depends on its shape; take stages of even size (stage x chunks "
        "that divides the layers), or an optimizer that updates each value by itself, "
        "such as adam"
    )


def _errors(
    optimizer: optax.GradientTransformation,
    parameters: Params,
    compiler_options: Mapping[str, Any] | None,
) -> dict[str, float]:
    """Path -> the largest relative error of its updates."""
    size = _largest_dim(parameters)

    params = _both_ways(parameters, size, 0.1, seed=0)
    states = tuple(optimizer.init(tree) for tree in params)

    @functools.partial(jax.jit, compiler_options=compiler_options)
    def update(gradients: tuple, states: tuple) -> tuple:
        return tuple(
            optimizer.update(one, state, tree)
            for one, state, tree in zip(gradients, states, params, strict=True)
        )

    errors, num_updates = [], 0
    for seed in range(1, _MOST_STEPS + 1):
        magnitude = _MAGNITUDES[num_updates]
        gradients = _both_ways(parameters, size, magnitude, seed)
        (wanted, first), (found, second) = update(gradients, states)
        states = (first, second)
        errors.append(
            jax.tree.map(_error, parameters, wanted, found, is_leaf=is_parameter)
        )
        num_updates += any(np.any(leaf) for leaf in jax.tree.leaves(wanted))
        if num_updates == len(_MAGNITUDES):
            break
    worst = jax.tree.map(lambda *of_steps: max(of_steps), *errors)
    return {path_name(path): error for path, error in jax.tree.leaves_with_path(worst)}


def _both_ways(
    parameters: Params, size: int, magnitude: float, seed: int
) -> tuple[Params, Params]:
    """Random values, layers first to last, and as the stages hold them."""
    random = np.random.default_rng(seed)
    in_order = jax.tree.map(
        lambda one: magnitude * _values(one, size, random),
        parameters,
        is_leaf=is_parameter,
    )
    return in_order, jax.tree.map(_arranged, parameters, in_order, is_leaf=is_parameter)


def _largest_dim(parameters: Params) -> int:
    """The most values that a dim of a probe's array has, within `_MOST_VALUES`."""
    size = _LARGEST_DIM
    leaves = jax.tree.leaves(parameters, is_leaf=is_parameter)
    while size > 2 and sum(_num_values(one, size) for one in leaves) > _MOST_VALUES:
        size = size // 2 + 1
    return size


def _num_values(parameter: Parameter, size: int) -> int:
    dims = (min(dim, size) for dim in parameter.shape)
    return int(np.prod([parameter.num_layers or 1, *dims]))


def _values(parameter: Parameter, size: int, random: np.random.Generator) -> np.ndarray:
    layers = () if parameter.num_layers is None else (parameter.num_layers,)
    shape = (*layers, *(min(dim, size) for dim in parameter.shape))
    return random.standard_normal(shape, np.float32)


def _arranged(parameter: Parameter, value: np.ndarray) -> np.ndarray:
    if _in_order(parameter):
        return value
    order = np.asarray(parameter.layer_order)
    here = (order >= 0).reshape(-1, *(1,) * (value.ndim - 1))
    return np.where(here, value[np.maximum(order, 0)], np.float32(0))


def _error(parameter: Parameter, wanted: jax.Array, found: jax.Array) -> float:
    difference = np.asarray(found) - _arranged(parameter, np.asarray(wanted))
    if not _in_order(parameter):
        difference = difference[np.asarray(parameter.layer_order) >= 0]
    error = float(np.linalg.norm(difference.ravel()))
    scale = float(np.linalg.norm(np.asarray(wanted).ravel()))
    return error / scale if error else 0.0


def _in_order(parameter: Parameter) -> bool:
    order = parameter.layer_order
    return order is None or order == tuple(range(parameter.num_layers))


def _places(model: Model, path: str) -> str:
    parameter = model.flat_parameters()[path]
    if parameter.layer_order is None:
        parameter = next(
            one for one in model.flat_parameters().values() if not _in_order(one)
        )
    layers, places = parameter.num_layers, len(parameter.layer_order)
    if layers == places:
        return f"{layers} layers in another order"
    return f"{layers} layers in {places} places, {places - layers} of them empty"
