"""Check that a batch has the arrays, dims, kinds and values that its model declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import InputError, nearest
from meshpar.hardware.platforms import platform_named
from meshpar.model.inputs import BATCH_DIM, Input, Inputs

_ACCEPTED = {
    "int": (jnp.integer,),
    "float": (jnp.floating, jnp.integer, jnp.bool_),
    "bool": (jnp.bool_,),
    "complex": (jnp.inexact,),
}


def check_batch(inputs: Inputs, batch: Mapping[str, Any]) -> int:
    """Return the number of examples of a batch whose arrays are as declared.

    Args:
        inputs: What the model declares. Of a model that declares nothing, all arrays
            need the example first and nothing else.
        batch: Name -> array or its shape.

    Raises:
        InputError: An array is missing or not declared, is none, has other dims or
            another kind of numbers than declared, a size that another array
            contradicts, or numbers that `check_values` refuses.
    """
    if not isinstance(batch, Mapping) or not batch:
        found = "empty" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise InputError(
            f"the batch is {found}; give a dict of arrays by name, such as "
            f"{', '.join(map(repr, inputs)) or 'the names that the model reads'}",
            key="batch.not_a_dict",
        )
    for name, declared in inputs.items():
        if name not in batch and not declared.optional:
            has = ", ".join(map(repr, batch))
            raise InputError(
                f"the batch has {has}, but no {name!r}, which the model declares as "
                f"{declared.logical_axes}",
                key="batch.missing_array",
            )
    for name, array in batch.items():
        if inputs and name not in inputs:
            dims = ("batch", *(None for _ in np.shape(array)[1:]))
            raise InputError(
                f"the model declares no batch[{name!r}]; {nearest(str(name), inputs)}. "
                "Leave the array out, or declare it in the model's inputs: "
                f"replace(model, inputs={{**model.inputs, {name!r}: "
                f"meshpar.Input({dims}, {_input_kind(array)!r}, optional=True)}})",
                key="batch.unknown_array",
            )
    sizes: dict[str, tuple[str, int]] = {}
    for name, array in batch.items():
        _check_array(name, array, inputs.get(name))
        one = inputs.get(name)
        axes = (BATCH_DIM,) if one is None else one.logical_axes
        for axis, size in zip(axes, array.shape, strict=False):
            if axis is None:
                continue
            first, known = sizes.setdefault(axis, (name, size))
            if size != known:
                raise InputError(
                    f"batch[{name!r}] has shape {tuple(array.shape)}, but "
                    f"batch[{first!r}] has shape {tuple(batch[first].shape)}: "
                    f"{axis!r} is {size} in one and {known} in the other; arrays of a "
                    "batch agree in the dims that they share",
                    key="batch.sizes_disagree",
                )
    check_values(inputs, batch)
    return sizes[BATCH_DIM][1]


def check_values(inputs: Inputs, batch: Mapping[str, Any]) -> None:
    """Raise if indices are out of range, integers wrap, or weights are negative.

    Only arrays in the host's memory are looked at, those of JAX on CPU devices among
    them: one on another device would have to come back first.

    Args:
        inputs: What the model declares.
        batch: Name -> array, of the shapes that are declared.

    Raises:
        InputError: An integer is no index of what it selects, or has more bits than
            devices keep, or a weight is below 0; it names the first and its place.
            Values that are not finite make a step that is skipped and counted.
    """
    for name, given in batch.items():
        declared = inputs.get(name)
        below = None if declared is None else declared.below
        is_weight = declared is not None and declared.is_weight
        wraps = jax.dtypes.canonicalize_dtype(given.dtype) != given.dtype
        if not (wraps or is_weight or below is not None):
            continue
        array = _in_host_memory(given)
        if array is None or not array.size:
            continue
        if wraps and jnp.issubdtype(array.dtype, jnp.integer):
            _check_bits(name, array)
        if is_weight:
            _check_weights(name, array)
        if below is not None and declared is not None:
            weights = batch.get(str(declared.counted_by))
            here = _in_host_memory(weights)
            if weights is None or here is not None:
                _check_below(name, array, below, None if here is None else here != 0)


def _input_kind(array: Any) -> str:
    dtype = getattr(array, "dtype", np.float32)
    kinds = {"bool": jnp.bool_, "int": jnp.integer, "complex": jnp.complexfloating}
    found = (kind for kind, of in kinds.items() if jnp.issubdtype(dtype, of))
    return next(found, "float")


def _in_host_memory(array: Any) -> np.ndarray | None:
    if isinstance(array, np.ndarray):
        return array
    if not isinstance(array, jax.Array) or not array.is_fully_addressable:
        return None
    on_host = all(platform_named(one.platform).is_host for one in array.devices())
    return np.asarray(array) if on_host else None


def _check_array(name: str, array: Any, declared: Input | None) -> None:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise InputError(
            f"batch[{name!r}] is a {type(array).__name__}; give an array, such as "
            "numpy.asarray of it",
            key="batch.not_an_array",
        )
    shape = tuple(array.shape)
    _check_storage(name, array, shape)
    if declared is None:
        if not shape:
            raise InputError(
                f"batch[{name!r}] has shape (); the example comes first in every array",
                key="batch.no_example_dim",
            )
        return
    wrong = len(shape) != len(declared.logical_axes) or any(
        size not in (None, found)
        for size, found in zip(declared.sizes, shape, strict=False)
    )
    if wrong:
        fixed = f" of shape {declared.shape}" if declared.shape else ""
        raise InputError(
            f"batch[{name!r}] has shape {shape}; the model declares it as "
            f"{declared.logical_axes}{fixed}",
            key="batch.wrong_shape",
        )
    if not any(jnp.issubdtype(array.dtype, kind) for kind in _ACCEPTED[declared.kind]):
        raise InputError(
            f"batch[{name!r}] has dtype {array.dtype}, but the model declares numbers "
            f"of kind {declared.kind!r}; convert it with .astype(numpy."
            f"{jnp.dtype(declared.dtype).name})",
            key="batch.wrong_dtype",
        )
    is_real = jnp.issubdtype(array.dtype, jnp.floating)
    if declared.has_gradient and not is_real:
        raise InputError(
            f"batch[{name!r}] has dtype {array.dtype}, but the model declares it with "
            "a gradient, which only real numbers have; convert it with "
            ".astype(numpy.float32)",
            key="batch.dtype_without_gradient",
        )


def _check_storage(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raise if JAX cannot take an array, or it has no elements."""
    if 0 in shape:
        raise InputError(
            f"batch[{name!r}] has shape {shape}, which has nothing to train on; "
            "leave such a batch out",
            key="batch.empty_array",
        )
    if isinstance(array, np.ma.MaskedArray):
        raise InputError(
            f"batch[{name!r}] is a masked array, whose mask would be lost; give "
            "array.filled(VALUE), and what counts as the batch's weights",
            key="batch.masked_array",
        )
    if isinstance(array, np.ndarray) and not array.dtype.isnative:
        raise InputError(
            f"batch[{name!r}] has dtype {array.dtype}, of another byte order than this "
            "machine's; give array.astype(array.dtype.newbyteorder('='))",
            key="batch.other_byte_order",
        )


def _check_below(
    name: str, array: np.ndarray, below: int, counted: np.ndarray | None
) -> None:
    if array.min() >= 0 and array.max() < below:
        return
    wrong = (array < 0) | (array >= below)
    if counted is not None and counted.shape == wrong.shape:
        wrong &= counted
    if not wrong.any():
        return
    value, place = _first(array, wrong)
    uncounted = "" if counted is None else ", or give it the weight 0"
    raise InputError(
        f"batch[{name!r}] has {value} at {place}, but the model takes 0 to "
        f"{below - 1} there: give numbers below {below}, or a larger model"
        f"{uncounted}",
        key="batch.index_out_of_range",
    )


def _check_bits(name: str, array: np.ndarray) -> None:
    """Raise if integers change their value when JAX stores them in fewer bits."""
    kept = jnp.iinfo(jax.dtypes.canonicalize_dtype(array.dtype))
    wrong = (array < kept.min) | (array > kept.max)
    if not wrong.any():
        return
    value, place = _first(array, wrong)
    raise InputError(
        f"batch[{name!r}] has {value} at {place}, but JAX keeps {kept.bits} bits: "
        f"give numbers from {kept.min} to {kept.max}",
        key="batch.too_many_bits",
    )


def _check_weights(name: str, array: np.ndarray) -> None:
    wrong = array < 0
    if not wrong.any():
        return
    value, place = _first(array, wrong)
    raise InputError(
        f"batch[{name!r}] has {value} at {place}, but the model declares it as weights "
        "of the loss: give numbers of 0 or more",
        key="batch.wrong_weight",
    )


def _first(array: np.ndarray, wrong: np.ndarray) -> tuple[Any, tuple[int, ...]]:
    """Return the first number that is wrong, and its place."""
    place = np.unravel_index(np.argmax(wrong), array.shape)
    return array[place], tuple(map(int, place))
