"""Data parallel: the one reduction of gradients over the batch axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from meshpar.collectives import asked
from meshpar.rules.rules import spec_axes

Arrays = list[jax.Array]
SumOver = Callable[[Arrays, tuple[str, ...]], Arrays]
"""(this device's arrays, mesh axes) -> their sums over those, on every device."""


def all_together(arrays: Arrays, mesh_axes: tuple[str, ...]) -> Arrays:
    """One all-reduce of all arrays."""
    with asked("gradient_reduction"):
        return lax.psum(arrays, mesh_axes)


def reduce_gradients(
    stored: Any,
    gradients: Any,
    mesh_axes: tuple[str, ...],
    sum_over: SumOver = all_together,
) -> Any:
    """Sums each gradient over the mesh axes that it has not been reduced over yet.

    States that are whole on all devices: one all-reduce of all their gradients. Those
    split over some mesh axes, already reduce-scattered there: one over the rest.
    Each all-reduce of P values sends 2 P (n-1)/n.

    Args:
        stored: Tree of `Stored`.
        gradients: The same tree of gradients, this device's, reduce-scattered where
            their states are split.
        mesh_axes: Mesh axes of size above 1 that split the batch, and `stage`.
        sum_over: What sums them; `by_host` in more than one collective.
    """
    layouts, treedef = jax.tree.flatten(stored)
    leaves = treedef.flatten_up_to(gradients)
    remaining = [
        tuple(axis for axis in mesh_axes if axis not in spec_axes(layout.state_spec))
        for layout in layouts
    ]
    for axes in sorted(set(remaining) - {()}):
        at = [index for index, wanted in enumerate(remaining) if wanted == axes]
        parts = [leaves[index].astype(layouts[index].sum_dtype) for index in at]
        summed = sum_over(parts, axes)
        for index, leaf in zip(at, summed, strict=True):
            leaves[index] = leaf
    return treedef.unflatten(leaves)
