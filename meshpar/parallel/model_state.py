"""A model's state after a step: what its blocks summed up, over the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from meshpar.collectives import asked, sum_dtype
from meshpar.layout import TOKEN_AXES
from meshpar.model.contract import Model
from meshpar.model.parameter import Params
from meshpar.model.sums import Sums
from meshpar.parallel.blocks import Stack
from meshpar.parallel.placement import Placement


def statistics_of(stack: Stack, sums: Sums) -> Sums:
    """The sums of a stack that its state is made of, (places, ...) each."""
    auxiliary = stack.block.group.auxiliary
    return {name: value for name, value in sums.items() if name not in auxiliary}


def summed_statistics(
    placement: Placement, stacks: Sequence[Stack], sums: Sequence[Sums]
) -> list[Sums]:
    """Of each group, what its state is made of, over the global batch.

    One all-reduce over the mesh axes that split tokens, where there is any.
    """
    found = [statistics_of(*of) for of in zip(stacks, sums, strict=True)]
    return sum_statistics(placement, found)


def sum_statistics(placement: Placement, found: list[Sums]) -> list[Sums]:
    """Sums of this device's tokens -> of the global batch."""
    axes = placement.large(TOKEN_AXES)
    if not axes or not jax.tree.leaves(found):
        return found
    wide = jax.tree.map(
        lambda x: x.astype(sum_dtype(x.dtype, placement.platform)), found
    )
    with asked("batch_sum"):
        summed = jax.lax.psum(wide, axes)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), summed, found)


def updated_state(model: Model, state: Params, statistics: Sequence[Sums]) -> Params:
    """The state after a step, layer by layer.

    Args:
        model: The model.
        state: Before, (places, ...) in each group.
        statistics: Of each group: its sums over the global batch, (places, ...).
    """
    new: dict[str, Any] = dict(state)
    for group, sums in zip(model.groups, statistics, strict=True):
        if group.update_state is not None and group.name in state:
            before = state[group.name]
            after = jax.vmap(group.update_state)(before, sums)
            new[group.name] = jax.tree.map(
                lambda one, like: one.astype(like.dtype), after, before
            )
    return new
