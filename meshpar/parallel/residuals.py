"""What `jax.vjp` keeps for the backward, without what is at hand there anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """The residuals that must be kept, and where the others go back."""

    kept: list[jax.Array]
    treedef: Any = field(metadata={"static": True})
    known_at: tuple[int | None, ...] = field(metadata={"static": True})


def vjp_without(
    function: Callable[..., Any],
    differentiated: Sequence[Any],
    known: Any,
    *,
    has_aux: bool = False,
) -> tuple[Any, ...]:
    """`function(*differentiated)` and its residuals, less the arrays in `known`.

    `jax.vjp` keeps an argument that the backward needs as that very array, so those
    arrays are found by identity, wherever JAX's version stores them.

    Args:
        function: A function of arrays -> a tree of arrays; it may close over arrays.
        differentiated: Its arguments.
        known: Tree of arrays that `restore_vjp` will be given again.
        has_aux: Whether the function returns a pair, its second without gradient.

    Returns:
        The value, the residuals, and with `has_aux` the second of the pair.
    """
    value, vjp, *others = jax.vjp(  # type: ignore[call-overload]  # knows literals only
        function, *differentiated, has_aux=has_aux
    )
    leaves, treedef = jax.tree.flatten(vjp)
    place = {id(array): at for at, array in enumerate(jax.tree.leaves(known))}
    known_at = tuple(place.get(id(leaf)) for leaf in leaves)
    kept = [leaf for leaf, at in zip(leaves, known_at, strict=True) if at is None]
    return value, Residuals(kept, treedef, known_at), *others


def restore_vjp(residuals: Residuals, known: Any) -> Callable[..., tuple]:
    """The backward: cotangent of the value -> cotangents of `differentiated`."""
    at_hand, kept = jax.tree.leaves(known), iter(residuals.kept)
    leaves = [next(kept) if at is None else at_hand[at] for at in residuals.known_at]
    return jax.tree.unflatten(residuals.treedef, leaves)
