"""Column-parallel matmuls of a residual stream that is split along its sequence."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshpar.model.scope import Scope
from meshpar.parallel.tensor import AnyArray
from meshpar.rules.rules import LogicalAxes

_WHOLE = ("batch", "seq", "embed")


def column_parallel(
    dims: str,
    x: Float[AnyArray, "batch seq embed"],
    weight: Float[AnyArray, "*weight"],
    out_axes: LogicalAxes,
    scope: Scope,
) -> Float[Array, "batch seq *out"]:
    """`einsum(dims, x, weight)` with the sequence of `x` whole on every device.

    Where the residual stream is split along its sequence, GSPMD makes it whole with an
    all-gather of batch x seq x embed values over those mesh axes, once more in the
    backward, and only the split one is kept in between; the gradient of `x` takes a
    reduce-scatter of as many. Reference: Korthikanti et al. 2022, section 4.2.2.

    Args:
        dims: Of the einsum; `x` is (batch, seq, embed).
        x: The input, laid out as the residual stream.
        weight: Its output dims are split, not `embed`.
        out_axes: Logical axes of the result.
        scope: Where the function runs.
    """
    if scope.rules is None:
        return jnp.einsum(dims, x, weight)
    return scope.constrain(_matmul(dims, scope.rules, x, weight), out_axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(dims: str, rules: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum(dims, rules.constrain(x, _WHOLE), weight)


# Not by `_matmul`, in which a remat policy of dots would not see this one.
def _forward(
    dims: str, rules: Any, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple]:
    return jnp.einsum(dims, rules.constrain(x, _WHOLE), weight), (x, weight)


def _backward(
    dims: str, rules: Any, kept: tuple, dy: jax.Array
) -> tuple[jax.Array, Any]:
    x, weight = kept
    x = rules.constrain(x, _WHOLE)
    _, vjp = jax.vjp(lambda x, weight: jnp.einsum(dims, x, weight), x, weight)
    return vjp(dy)


_matmul.defvjp(_forward, _backward)
