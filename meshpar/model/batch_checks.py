"""Whether a batch is as its model declares it: arrays, dims, kinds and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshpar.errors import InputError
from meshpar.model.inputs import BATCH_DIM, Input, Inputs

_ACCEPTED = {
    "int": (jnp.integer,),
    "float": (jnp.floating, jnp.integer, jnp.bool_),
    "bool": (jnp.bool_,),
    "complex": (jnp.inexact,),
}


def check_batch(inputs: Inputs, batch: Mapping[str, Any]) -> int:
    """The number of examples of a batch, once every array is as declared.

    Arrays that are not declared need the example first and nothing else.

    Args:
        inputs: What the model declares.
        batch: Name -> array or its shape.

    Raises:
        InputError: An array is missing, is none, has other dims or another kind of
            numbers than declared, a size that another array contradicts, or (in a
            NumPy array) a number that is not below what is declared.
    """
    if not isinstance(batch, Mapping) or not batch:
        raise InputError(
            f"the batch is {_described(batch)}; give a dict of arrays by name, such as "
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
    sizes: dict[str, tuple[str, int]] = {}
    for name, array in batch.items():
        _check_array(name, array, inputs.get(name))
        for axis, size in _named_dims(array, inputs.get(name)):
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
    """Refuses whole numbers that are no index of what they select.

    Only arrays of NumPy are looked at: one on a device would have to come back first.

    Args:
        inputs: What the model declares; `below` is the bound.
        batch: Name -> array, of the shapes that are declared.

    Raises:
        InputError: Of the first such number, with its place.
    """
    for name, declared in inputs.items():
        array = batch.get(name)
        if declared.below is not None and isinstance(array, np.ndarray):
            _check_below(name, array, declared.below)


def _named_dims(array: Any, declared: Input | None) -> Iterator[tuple[str, int]]:
    axes = (BATCH_DIM,) if declared is None else declared.logical_axes
    for axis, size in zip(axes, array.shape, strict=False):
        if axis is not None:
            yield axis, size


def _check_array(name: str, array: Any, declared: Input | None) -> None:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise InputError(
            f"batch[{name!r}] is a {type(array).__name__}; give an array, such as "
            "numpy.asarray of it",
            key="batch.not_an_array",
        )
    shape = tuple(array.shape)
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


def _check_below(name: str, array: np.ndarray, below: int) -> None:
    if not array.size or (array.min() >= 0 and array.max() < below):
        return
    place = np.unravel_index(np.argmax((array < 0) | (array >= below)), array.shape)
    raise InputError(
        f"batch[{name!r}] has {array[place]} at {tuple(map(int, place))}, but the "
        f"model takes 0 to {below - 1} there: give numbers below {below}, or a model "
        "that knows more",
        key="batch.index_out_of_range",
    )


def _described(batch: Any) -> str:
    return "empty" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
