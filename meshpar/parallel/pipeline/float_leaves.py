"""The real or complex arrays of a tree, those that have gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def differentiable(tree: Any) -> list[jax.Array]:
    """The real or complex arrays of a tree, in order."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def split_floats(tree: Any) -> tuple[list, Callable[[list], Any]]:
    """The real or complex arrays of a tree, and the tree with others in their place."""
    leaves, treedef = jax.tree.flatten(tree)

    def filled(floats: list) -> Any:
        left = iter(floats)
        return treedef.unflatten(
            [next(left) if is_float(leaf) else leaf for leaf in leaves]
        )

    return differentiable(tree), filled


def is_float(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)
