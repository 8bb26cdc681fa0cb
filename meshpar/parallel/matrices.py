"""An operation on each whole matrix of some arrays, as one operation of a trace.

An optimizer that mixes the rows of a matrix writes what it does by `on_matrices`. A
training step then gives each matrix to one device (`meshpar.parallel.by_owners`);
anywhere else the matrices are computed where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


@dataclass(frozen=True)
class OnMatrices:
    """An operation on each matrix of an array.

    Args:
        function: (matrix, shared arrays) -> matrix of the same shape and dtype. It is
            hashable, and its repr tells it from others.
        batch_dims: Dims of the array with a matrix for each place; a matrix has the
            other dims.
        flops: Multiplies and adds for one matrix.
    """

    function: Callable[..., jax.Array]
    batch_dims: tuple[int, ...]
    flops: int

    def __call__(self, array: jax.Array, *shared: jax.Array) -> jax.Array:
        """Return the results for all matrices of an array."""
        rows = matrix_rows(array, self.batch_dims)
        in_axes = (0, *(None,) * len(shared))
        results = jax.vmap(self.function, in_axes)(rows, *shared)
        return from_matrix_rows(results, array.shape, self.batch_dims)


def matrix_rows(array: jax.Array, batch_dims: Sequence[int]) -> jax.Array:
    """Return the matrices of an array along one leading dim."""
    moved = jnp.moveaxis(array, batch_dims, range(len(batch_dims)))
    return lax.collapse(moved[None], 0, 1 + len(batch_dims))


def from_matrix_rows(
    rows: jax.Array, shape: tuple[int, ...], batch_dims: Sequence[int]
) -> jax.Array:
    """Return the array of a shape whose matrices `matrix_rows` returned."""
    leading = [shape[dim] for dim in batch_dims]
    moved = rows.reshape(*leading, *rows.shape[1:])
    return jnp.moveaxis(moved, range(len(batch_dims)), batch_dims)


def on_matrices(
    operations: Sequence[OnMatrices],
    arrays: Sequence[jax.Array],
    *shared: jax.Array,
) -> list[jax.Array]:
    """Return the results of one operation for each array.

    Args:
        operations: Operations.
        arrays: An array for each.
        shared: Arrays that every operation takes beside its matrix.

    Example:
        >>> double = OnMatrices(lambda matrix, rate: rate * matrix, (0,), flops=0)
        >>> [found] = on_matrices([double], [jnp.ones((3, 2, 2))], jnp.float32(2))
        >>> found.shape, float(found.sum())
        ((3, 2, 2), 24.0)
    """
    if not operations:
        return []
    return ON_MATRICES.bind(*arrays, *shared, operations=tuple(operations))


ON_MATRICES = Primitive("on_matrices")
"""Primitive of `on_matrices`: its operands are the arrays, then the shared ones."""


def _computed(
    *operands: jax.Array, operations: tuple[OnMatrices, ...]
) -> list[jax.Array]:
    shared = operands[len(operations) :]
    return [
        operation(array, *shared)
        for operation, array in zip(operations, operands, strict=False)
    ]


def _batched(
    operands: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[list[jax.Array], list[int]]:
    results = jax.vmap(partial(_computed, **params), dims)(*operands)
    return results, [0] * len(results)


ON_MATRICES.multiple_results = True
ON_MATRICES.def_impl(jax.jit(_computed, static_argnames="operations"))
ON_MATRICES.def_abstract_eval(
    lambda *operands, operations: list(operands[: len(operations)])
)
mlir.register_lowering(ON_MATRICES, mlir.lower_fun(_computed, multiple_results=True))
batching.primitive_batchers[ON_MATRICES] = _batched
