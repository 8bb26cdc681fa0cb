"""Gradients reduced after the loop of ticks, slice by slice where they are large.

Reduced as a whole, a stacked gradient is there twice: as it was added up, and summed
over devices and scaled. Here a loop runs along its first dim, and a slice's result
takes the place of what it was made of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked
from meshpar.model.parameter import Params
from meshpar.parallel.pipeline.crossing import STAGE
from meshpar.parallel.placement import Placement
from meshpar.parallel.reduction import in_fp32, reduce_gradients
from meshpar.parallel.zero import gradient_after_loop, scatter_after_loop

SLICE_BYTES = 2**28
"""Most bytes that are reduced at once if gradients have more than one layer: large
enough to hide any link's latency, small compared with the blocks' own memory."""

_MOST_SMALLER = 4


def reduce_in_slices(
    placement: Placement,
    end_gradients: Params,
    group_gradients: Sequence[Params],
) -> Params:
    """Reduce gradients as `Placement.reduce`, in more and smaller collectives.

    Args:
        placement: The model on its mesh.
        end_gradients: Gradients of the ends as the ticks added them up.
        group_gradients: Gradients of each group of blocks, (layers, ...) each.
    """
    reduced = functools.partial(reduced_as_stored, placement)
    of_ends, of_groups = placement.model.split(placement.stored)
    if all(num_slices(gradients) == 1 for gradients in group_gradients):
        gradients = placement.model.join(end_gradients, list(group_gradients))
        return reduced(placement.stored, gradients)
    groups = [
        along_first_dim(reduced, stored, gradients)
        for stored, gradients in zip(of_groups, group_gradients, strict=True)
    ]
    return placement.model.join(reduced(of_ends, end_gradients), groups)


def reduced_as_stored(placement: Placement, stored: Any, gradients: Any) -> Any:
    """Sum gradients over the batch axes and `stage`, as their states are laid out.

    Args:
        placement: The model on its mesh.
        stored: Tree of `Stored` of parameters, or of some of them.
        gradients: The same tree, as the ticks added them up.
    """
    mesh_axes = placement.large(placement.manual_axes)
    summed = reduced_in_fp32(stored, gradients, mesh_axes, **placement.sum_options)
    return jax.tree.map(
        lambda layout, x: x.astype(layout.gradient_dtype), stored, summed
    )


def reduced_in_fp32(
    stored: Any, gradients: Any, mesh_axes: tuple[str, ...], **how: Any
) -> Any:
    """Sum gradients over mesh axes, laid out as their states; real ones as fp32.

    Communicates as `Placement.reduce`; `how` is as of `reduce_gradients`.
    """
    scattered = scatter_after_loop(stored, gradients)
    summed = reduce_gradients(stored, scattered, mesh_axes, **how)
    return in_fp32(summed)


def summed_inputs(
    placement: Placement, gradients: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Sum the inputs' gradients of the shares that the ranks of `stage` have.

    One all-reduce over `stage` of fp32, as many values as the inputs have on a device.
    """
    mesh_axes = placement.large((STAGE,))
    if mesh_axes and gradients:
        with asked("input_gradient"):
            gradients = lax.psum(gradients, mesh_axes)
    return in_fp32(gradients)


def along_first_dim(reduced: Callable[[Any, Any], Any], stored: Any, tree: Any) -> Any:
    """Return `reduced(stored, tree)`, computed in slices along the arrays' first dim.

    Arrays that are scattered along that dim, or have another size there, are reduced
    as a whole.

    Args:
        reduced: Sums, and may scatter other dims; for any size of the first.
        stored: Tree of `Stored`.
        tree: Arrays of one size in the first dim.
    """
    layouts, treedef = jax.tree.flatten(stored)
    leaves = treedef.flatten_up_to(tree)
    number = num_slices(tree)
    sliced = [
        at
        for at, layout in enumerate(layouts)
        if number > 1 and all(dim != 0 for dim, _ in gradient_after_loop(layout))
    ]
    whole = [at for at in range(len(leaves)) if at not in sliced]

    def reduce_leaves(places: list[int], arrays: list[jax.Array]) -> list[jax.Array]:
        return reduced([layouts[at] for at in places], arrays)

    at_once = reduce_leaves(whole, [leaves[at] for at in whole])
    looped = _loop(
        lambda arrays: reduce_leaves(sliced, arrays),
        [leaves[at] for at in sliced],
        number,
    )
    results = dict(zip(whole + sliced, at_once + looped, strict=True))
    return treedef.unflatten([results[at] for at in range(len(leaves))])


def num_slices(tree: Any) -> int:
    """Return the least number of equal slices along the first dim up to `SLICE_BYTES`.

    One if that takes more than `_MOST_SMALLER` times as many, as for a prime first dim:
    a loop over slivers would wait for its collectives alone.
    """
    leaves = jax.tree.leaves(tree)
    length = min((leaf.shape[0] for leaf in leaves), default=1)
    if any(leaf.shape[0] != length for leaf in leaves):
        return 1
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    least = max(math.ceil(num_bytes / SLICE_BYTES), 1)
    if least >= length:
        return max(length, 1)
    most = min(length, _MOST_SMALLER * least)
    return next((n for n in range(least, most + 1) if length % n == 0), 1)


def _loop(
    reduced: Callable[[list[jax.Array]], list[jax.Array]],
    arrays: list[jax.Array],
    number: int,
) -> list[jax.Array]:
    """Return `reduced(arrays)`; a result shaped and typed as its array replaces it."""
    if not arrays:
        return []
    size = arrays[0].shape[0] // number
    shapes = jax.eval_shape(reduced, arrays)
    takes_place = [
        (shape.shape, shape.dtype) == (array.shape, array.dtype)
        for shape, array in zip(shapes, arrays, strict=True)
    ]
    first = [
        array if same else jnp.zeros(shape.shape, shape.dtype)
        for same, array, shape in zip(takes_place, arrays, shapes, strict=True)
    ]

    def body(at: jax.Array, found: list[jax.Array]) -> list[jax.Array]:
        slices = [
            lax.dynamic_slice_in_dim(one if same else array, at * size, size)
            for same, one, array in zip(takes_place, found, arrays, strict=True)
        ]
        return [
            lax.dynamic_update_slice_in_dim(one, result, at * size, 0)
            for one, result in zip(found, reduced(slices), strict=True)
        ]

    return lax.fori_loop(0, number, body, first)
