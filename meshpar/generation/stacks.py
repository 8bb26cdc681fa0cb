"""The layers of each group that a device has, while a model generates."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from meshpar.model.parameter import Params
from meshpar.parallel.blocks import Block, Stack
from meshpar.parallel.pipeline.rank_layers import layers_here
from meshpar.parallel.pipeline.stages import Arrangement
from meshpar.parallel.placement import Placement, Scopes
from meshpar.parallel.program import one_layer


def stacks_of(
    placement: Placement,
    arrangement: Arrangement | None,
    groups: Sequence[Params],
    states: Sequence[Params],
    scopes: Scopes,
) -> list[Stack]:
    """A stack for each group, inside `jax.shard_map`.

    Args:
        placement: The model on its mesh.
        arrangement: Which layers every rank has; None without stages.
        groups: Parameters of each group, this device's; stacked, or layer by layer
            (`layer_by_layer`).
        states: The model's own state of each.
        scopes: Of its functions.
    """
    model = placement.model
    _, stored = model.split(placement.stored)
    blocks = [
        Block(group, stored=one_layer(stored[at]), remat="none", make_scope=scopes)
        for at, group in enumerate(model.groups)
    ]
    if arrangement is None:
        layers = [
            first + jnp.arange(group.num_layers, dtype=jnp.int32)
            for group, first in zip(model.groups, model.first_layers, strict=True)
        ]
    else:
        layers = [
            layers_here(arrangement, at, jnp.int32(0), first=first)
            for at, first in enumerate(model.first_layers)
        ]
    return [
        Stack(block=block, shards=shards, state=state, layers=of_stack)
        for block, shards, state, of_stack in zip(
            blocks, groups, states, layers, strict=True
        )
    ]
