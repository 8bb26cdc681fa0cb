"""What keeps gradients' collectives behind the loops of a backward pass on XLA:CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.parallel.zero import is_stored


def behind(arrays: Any, gradients: Any, stored: Any) -> Any:
    """The same arrays, none of which is there before a loop has ended.

    XLA:CPU holds a collective back behind a loop until the loop has begun only, and
    pairs it with the loop's own if it does not need the loop's result (`emulate`): a
    decoder's table, whose gradient needs nothing of the encoder's backward loop, was
    wrong or ended the process. XLA:CPU drops barriers before it orders a program: so
    zero is added, made of a value of the loop, which XLA cannot know to be zero.

    Args:
        arrays: Those that collectives are to follow.
        gradients: Of the blocks whose backward loop runs last.
        stored: The same tree of `Stored`.
    """
    layouts = jax.tree.leaves(stored, is_leaf=is_stored)
    leaves = jax.tree.leaves(gradients)
    if not leaves:
        return arrays
    # The first value of an array that GSPMD splits would have to be sent.
    at = min(range(len(leaves)), key=lambda at: bool(layouts[at].automatic_axes))
    value = lax.index_in_dim(leaves[at].ravel(), 0, keepdims=False)
    finite = jnp.nan_to_num(value.real.astype(jnp.float32))
    zero = 0 * jnp.clip(finite, -1, 1)
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), arrays)
