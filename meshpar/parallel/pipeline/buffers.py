"""Buffers of slots, in which what waits for another tick is kept."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.parallel.pipeline.stages import part


def read(buffers: Any, slot: jax.Array) -> Any:
    """What is in a slot; in the first where it is negative."""
    return part(buffers, jnp.maximum(slot, 0))


def write(buffers: Any, slot: jax.Array, values: Any) -> Any:
    """Buffers with `values` in that slot; as they were where the slot is negative."""

    def one(buffer: jax.Array, value: jax.Array) -> jax.Array:
        value = jnp.where(slot >= 0, value.astype(buffer.dtype), read(buffer, slot))
        return lax.dynamic_update_index_in_dim(buffer, value, jnp.maximum(slot, 0), 0)

    return jax.tree.map(one, buffers, values)
