"""Functions whose backward keeps their inputs only: what costs no matmul to repeat.

Without it a bf16 block keeps fp32 copies of every step of a norm, six arrays for a
GELU, and the gathered sequence beside its shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshpar import Scope

WHOLE = ("batch", "seq", "embed")


def recomputed(function: Callable[..., jax.Array], *fixed: Any) -> Callable[..., Any]:
    """`function(*fixed, ...)` of arrays; its backward runs it again."""
    # Inside the loop over blocks XLA cannot merge the two runs anyway.
    return jax.checkpoint(functools.partial(function, *fixed), prevent_cse=False)


def column_parallel(
    dims: str, x: jax.Array, weight: jax.Array, scope: Scope
) -> jax.Array:
    """`einsum(dims, x, weight)` with the sequence of `x` whole on every device.

    Where the residual stream is split along its sequence, an all-gather makes it whole,
    once more in the backward, and only the split one is kept in between (Korthikanti
    et al. 2022, section 4.2.2). The matmul itself is not repeated: its gradients need
    its inputs only.

    Args:
        dims: Of the einsum; `x` is (batch, seq, embed).
        x: The input, laid out as the residual stream.
        weight: Its output dims are split, not `embed`.
        scope: Where the function runs.
    """

    def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.einsum(dims, scope.constrain(x, WHOLE), weight)

    return recomputed(matmul)(x, weight)
