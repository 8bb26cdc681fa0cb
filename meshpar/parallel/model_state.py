"""A model's state after a step, from sums of its blocks over the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.collectives import asked, summed
from meshpar.errors import InputError
from meshpar.layout import TOKEN_AXES
from meshpar.model.block_run import Sums
from meshpar.model.contract import BlockGroup
from meshpar.model.parameter import Params, flat
from meshpar.parallel.blocks import Stack
from meshpar.parallel.placement import Placement
from meshpar.parallel.zero import before_use, gather_shards, manual_spec
from meshpar.rules.rules import spec_axes
from meshpar.trace.dependence import arguments_read


def state_statistics(stack: Stack, sums: Sums) -> Sums:
    """Return the sums of a stack that its state is made of, (places, ...) each."""
    auxiliary = stack.block.group.auxiliary
    return {name: value for name, value in sums.items() if name not in auxiliary}


def updated_state(
    placement: Placement, params: Params, state: Params, statistics: Sequence[Sums]
) -> Params:
    """Return the state after a step, made layer by layer.

    One all-reduce of all sums over the mesh axes that split tokens. One all-gather over
    the batch axes for each parameter that a group's `update_from` reads and that is
    split there at rest: of its P values a device receives the P (n-1)/n that it lacks,
    a layer at a time, in the dtype at rest.

    Args:
        placement: The model on its mesh.
        params: This device's shards at rest, before the step.
        state: State before the step, (places, ...) in each group.
        statistics: Sums of each group over this device's examples, (places, ...).

    Raises:
        InputError: An update reads a parameter that is split over `expert`.
    """
    statistics = _summed(placement, statistics)
    new: dict[str, Any] = dict(state)
    model = placement.model
    (_, shards), (_, stored) = map(model.split, (params, placement.stored))
    for group, group_shards, layouts, sums in zip(
        model.groups, shards, stored, statistics, strict=True
    ):
        if group.changes_state and group.name in state:
            before = state[group.name]
            after = _updated(group, layouts, group_shards, before, sums)
            new[group.name] = jax.tree.map(
                lambda x, like: x.astype(like.dtype), after, before
            )
    return new


def updated_ends(placement: Placement, state: Params, statistics: Sums) -> Params:
    """Return the state with that of the ends after a step (`Model.update_ends`).

    One all-reduce of the statistics over the mesh axes that split tokens.

    Args:
        placement: The model on its mesh.
        state: State of the ends and of the groups.
        statistics: Sums of the head over this device's examples.
    """
    model = placement.model
    if model.update_ends is None:
        return state
    before, _ = model.split(state)
    (summed_here,) = _summed(placement, [statistics])
    after = model.update_ends(before, summed_here)
    return {
        **state,
        **jax.tree.map(lambda x, like: x.astype(like.dtype), after, before),
    }


def _summed(placement: Placement, statistics: Sequence[Sums]) -> Sequence[Sums]:
    """Sum each group's statistics over the global batch."""
    axes = placement.large(TOKEN_AXES)
    if not axes or not jax.tree.leaves(statistics):
        return statistics
    with asked("batch_sum"):
        return summed(statistics, axes, placement.platform)


def _updated(
    group: BlockGroup, stored: Any, shards: Params, before: Params, sums: Sums
) -> Params:
    """Return one group's state after a step; gather only parameters that it reads."""
    stacked, tree = jax.tree.flatten(stored)
    layouts = [layout.without_layers() for layout in stacked]
    leaves = tree.flatten_up_to(shards)

    def update(leaves: list[Any], *arrays: Any) -> Params:
        return group.updated(tree.unflatten(leaves), *arrays)

    def gathered(layouts: list[Any], leaves: list[Any]) -> list[Any]:
        return gather_shards(layouts, leaves, before_use)

    first = jax.tree.map(lambda x: x[0], (leaves, before, sums))
    whole = jax.eval_shape(lambda leaves: gathered(layouts, leaves), first[0])
    flags = arguments_read(update, whole, *first[1:])[: len(leaves)]
    read = [at for at, flag in enumerate(flags) if flag]
    _check_whole(group, tree, layouts, read)
    used = [layouts[at] for at in read]

    def update_layer(xs: tuple) -> Params:
        own, *arrays = xs
        values = [jnp.zeros(shape.shape, shape.dtype) for shape in whole]
        for at, value in zip(read, gathered(used, own), strict=True):
            values[at] = value
        return update(values, *arrays)

    xs = [leaves[at] for at in read], before, sums
    if any(map(before_use, used)):
        return jax.lax.map(update_layer, xs)
    return jax.vmap(update_layer)(xs)


def _check_whole(group: BlockGroup, tree: Any, layouts: list, read: list[int]) -> None:
    names = list(flat(tree.unflatten(layouts)))
    for at in read:
        axes = spec_axes(manual_spec(layouts[at].used_spec))
        if axes:
            raise InputError(
                f"block group {group.name!r}: its update of the state reads "
                f"{names[at]!r}, which a device has a part of (mesh axis {axes[0]!r}); "
                "compute the state from the block's sums instead, or set that axis "
                "to 1",
                key="model.state_update_reads_split",
            )
