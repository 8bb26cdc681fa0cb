"""The mean loss from its sums, what is reported beside it, and scaled gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshpar.model.sums import Sums


def random_key(seed: jax.Array, step: jax.Array) -> jax.Array:
    """The key that all randomness of a step derives from."""
    # Folded once more than the keys of initial values, which start from the same seed.
    key = jax.random.fold_in(jax.random.key(seed), jnp.uint32(0xD0))
    return jax.random.fold_in(key, step)


def metrics_of(weight_sum: jax.Array, auxiliary: Sums) -> dict[str, jax.Array]:
    """What a step reports beside the loss: weights, and each auxiliary loss's mean."""
    share = safe_inverse(weight_sum)
    means = {f"auxiliary.{name}": value * share for name, value in auxiliary.items()}
    return {"weight_sum": weight_sum, **means}


def safe_inverse(weight_sum: jax.Array) -> jax.Array:
    """1 / `weight_sum`, or 0 where nothing counts."""
    some = weight_sum != 0
    return jnp.where(some, 1 / jnp.where(some, weight_sum, 1), 0.0)


def scaled(tree: Any, scale: jax.Array | float, dtype: Any = None) -> Any:
    """Every array times an fp32 `scale`, rounded once.

    A scale rounded to an array's own few bits would move all its values one way.

    Args:
        tree: Arrays.
        scale: A scalar.
        dtype: Of the result where it is of real numbers; its own when absent.
    """
    wide = jnp.asarray(scale, jnp.float32)

    def of(x: jax.Array) -> jax.Array:
        real = jnp.issubdtype(x.dtype, jnp.floating)
        return (x * wide).astype(dtype if dtype is not None and real else x.dtype)

    return jax.tree.map(of, tree)


def in_fp32(tree: Any) -> Any:
    """Convert arrays of real numbers to fp32, and leave others as they are."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        tree,
    )
