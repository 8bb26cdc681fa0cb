"""A batch's shapes: checked, and as the compiler wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from meshpar.errors import InputError
from meshpar.model.scope import Batch

TOKEN_ARRAYS = ("tokens", "targets", "weights")
"""Names of the arrays that every batch has, (examples, seq) each."""

_TOKEN_IDS = ("tokens", "targets")


def batch_structs(batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every array, as the devices will hold it."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(
            array.shape, jax.dtypes.canonicalize_dtype(array.dtype)
        ),
        dict(batch),
    )


def check_alike(batch: Batch, required: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    """Name and shape of the first array, once all arrays fit it.

    Args:
        batch: Name -> array or its shape.
        required: Names that must be there.

    Raises:
        InputError: An array is missing, is none, or has another number of examples, or
            one of tokens, targets and weights another shape or kind of numbers.
    """
    for name in required:
        if name not in batch:
            has = ", ".join(map(repr, batch)) or "nothing"
            raise InputError(
                f"the batch has {has}, but no {name!r}; tokens, targets and weights "
                "are (examples, seq) each"
            )
    for name, array in batch.items():
        _check_array(name, array)
    shapes = {name: tuple(array.shape) for name, array in batch.items()}
    first, shape = next(iter(shapes.items()))
    for name, other in shapes.items():
        if other[:1] != shape[:1] or (name in TOKEN_ARRAYS and other != shape):
            raise InputError(
                f"batch[{name!r}] has shape {other}, but batch[{first!r}] has "
                f"shape {shape}; tokens, targets and weights are (examples, seq) "
                "alike, other arrays have the example first"
            )
    return first, shape


def _check_array(name: str, array: Any) -> None:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise InputError(
            f"batch[{name!r}] is a {type(array).__name__}; give an array, such as "
            "numpy.asarray of it"
        )
    dims = 2 if name in TOKEN_ARRAYS else 1
    if len(array.shape) < dims or (name in TOKEN_ARRAYS and len(array.shape) > dims):
        wanted = "(examples, seq)" if dims == 2 else "(examples, ...)"
        raise InputError(
            f"batch[{name!r}] has shape {tuple(array.shape)}; it must be {wanted}"
        )
    if name in _TOKEN_IDS and not jax.numpy.issubdtype(array.dtype, jax.numpy.integer):
        raise InputError(
            f"batch[{name!r}] has dtype {array.dtype}; token ids are integers: convert "
            "it with .astype(numpy.int32)"
        )
