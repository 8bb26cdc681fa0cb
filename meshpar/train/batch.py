"""A batch's shapes: checked, and as the compiler wants them."""

from __future__ import annotations

import jax

from meshpar.errors import InputError
from meshpar.scope import Batch

_TOKEN_ARRAYS = ("tokens", "targets", "weights")


def batch_structs(batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every array, as the devices will hold it."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(
            array.shape, jax.dtypes.canonicalize_dtype(array.dtype)
        ),
        dict(batch),
    )


def check_alike(batch: Batch) -> tuple[str, tuple[int, ...]]:
    """Name and shape of the first array, once all arrays fit it.

    Raises:
        InputError: An array has another number of examples, or one of tokens, targets
            and weights another shape.
    """
    shapes = {name: tuple(array.shape) for name, array in batch.items()}
    first, shape = next(iter(shapes.items()))
    for name, other in shapes.items():
        if other[:1] != shape[:1] or (name in _TOKEN_ARRAYS and other != shape):
            raise InputError(
                f"batch[{name!r}] has shape {other}, but batch[{first!r}] has "
                f"shape {shape}; tokens, targets and weights are (examples, seq) "
                "alike, other arrays have the example first"
            )
    return first, shape
