"""Values that a run starts from in place of drawn ones, each device reading its part.

What is given may be arrays, or anything with a shape and NumPy's indexing, such as a
memory-mapped file: it is asked for the parts that this process's devices hold, layer by
layer, and for no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshpar.errors import InputError, nearest
from meshpar.model.contract import Model
from meshpar.model.parameter import Parameter, Params, flat
from meshpar.rules.sharding import insert, path_name
from meshpar.train.constants import take_out
from meshpar.train.layer_order import LayerOrder, laid_out
from meshpar.train.state import TrainState


def check_seed(seed: int) -> None:
    """Refuses what no first state derives from.

    Raises:
        InputError: `seed` is no whole number from 0 to 2**32 - 1.
    """
    whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if not whole:
        raise InputError(
            f"seed={seed!r}: must be a whole number below {2**32}",
            key="value.not_whole_number",
        )
    if not 0 <= seed < 2**32:
        raise InputError(
            f"seed={seed}: must be at least 0 and below {2**32}",
            key="value.seed_out_of_range",
        )


def placed_start(
    model: Model, shardings: TrainState, params: Mapping | None, model_state: Mapping
) -> tuple[Params, Params]:
    """Parameters and model state that are given, each device's part of them on it.

    Args:
        model: Arranged for its stages.
        shardings: Of all that its step keeps.
        params: All parameters as `step.init` takes them; None for drawn ones.
        model_state: The state or a part of it.

    Raises:
        InputError: What is given is not of this model.
    """
    shardings = take_out(model, shardings)
    values = replace(shardings, params=dict(params or {}), model_state=model_state)
    given = take_out(model, values)
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
    """Given values on the devices, every layer at its place.

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
    """A part of a parameter as it lies; zeros at places without a layer.

    Args:
        value: Of the whole, layers first to last.
        spans: First index and the one after the last, dim by dim.
        parameter: Whose value it is, arranged for its stages.
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
    """Path -> leaf of a nested dict, whatever the leaves are."""
    leaves = jax.tree.leaves_with_path(
        tree, is_leaf=lambda node: not isinstance(node, Mapping)
    )
    return {path_name(path): leaf for path, leaf in leaves}
