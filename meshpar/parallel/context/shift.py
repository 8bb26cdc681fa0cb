"""What goes round a ring: the arrays of the device some places before this one."""

from __future__ import annotations

from typing import Any

from jax import lax

from meshpar.collectives import asked
from meshpar.model.token_order import TokenOrder


def shifted(
    order: TokenOrder | None, tree: Any, distance: int, reason: str = "context_ring"
) -> Any:
    """What the device `distance` places before this one has: one permute of each.

    This device sends the bytes of its arrays once; the backward sends as many back.

    Args:
        order: Of the tokens; None where a device has all.
        tree: This device's arrays.
        distance: Places along the ring.
        reason: A name in `meshpar.collectives.ASKED`.
    """
    if order is None or distance % order.num_ranks == 0:
        return tree
    with asked(reason):
        return lax.ppermute(tree, order.mesh_axis, order.hop(distance))


def shifted_both(order: TokenOrder | None, moved: tuple, distance: int) -> tuple:
    """`shifted`, of keys and values, and of their gradients."""
    keys, of_keys = moved
    return (
        shifted(order, keys, distance),
        shifted(order, of_keys, distance, "context_ring_gradient"),
    )
