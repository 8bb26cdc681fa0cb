"""Column-parallel matmuls of a residual stream that is split along its sequence."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.collectives import follow, zero_on_parts
from meshpar.model.scope import Scope
from meshpar.rules.rules import LogicalAxes, auto_mesh_shape

_WHOLE = ("batch", "seq", "embed")


def column_parallel(
    dims: str, x: jax.Array, weight: jax.Array, out_axes: LogicalAxes, scope: Scope
) -> jax.Array:
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
    y = _matmul(dims, out_axes, _Rules(scope), x, weight)
    return scope.constrain(y, out_axes)


class _Rules:
    """What the two passes need of a scope; equal for equal rules, for JAX's cache."""

    def __init__(self, scope: Scope) -> None:
        self.rules, self.in_order = scope.rules, scope.in_order

    def __hash__(self) -> int:
        return hash((self.rules, self.in_order))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rules) and vars(self) == vars(other)

    def whole(self, x: jax.Array) -> jax.Array:
        return self.rules.constrain(x, _WHOLE)

    def spec(self, x: jax.Array, logical_axes: LogicalAxes) -> PartitionSpec:
        return self.rules.spec(logical_axes, x.shape, mesh_shape=auto_mesh_shape())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _matmul(
    dims: str, out_axes: LogicalAxes, rules: _Rules, x: jax.Array, weight: jax.Array
) -> jax.Array:
    return jnp.einsum(dims, rules.whole(x), weight)


# Not by `_matmul`, in which a remat policy of dots would not see this one.
def _forward(
    dims: str, out_axes: LogicalAxes, rules: _Rules, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple]:
    return jnp.einsum(dims, rules.whole(x), weight), (x, weight)


def _backward(
    dims: str, out_axes: LogicalAxes, rules: _Rules, kept: tuple, dy: jax.Array
) -> tuple[jax.Array, Any]:
    x, weight = kept
    if rules.in_order:
        x = follow(x, zero_on_parts(dy, rules.spec(dy, out_axes)))
    x = rules.whole(x)
    if rules.in_order:
        dy = follow(dy, zero_on_parts(x, rules.spec(x, _WHOLE)))
    _, vjp = jax.vjp(lambda x, weight: jnp.einsum(dims, x, weight), x, weight)
    return vjp(dy)


_matmul.defvjp(_forward, _backward)
