"""The layers of each group that a device has, while a model generates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp

from meshpar.model.parameter import Params
from meshpar.parallel.block import Block
from meshpar.parallel.blocks import Stack
from meshpar.parallel.pipeline.rank_layers import RankLayers
from meshpar.parallel.pipeline.stages import Arrangement, cut
from meshpar.parallel.placement import Placement
from meshpar.parallel.program import one_layer
from meshpar.parallel.scopes import Scopes


def stacks_of(
    placement: Placement,
    arrangement: Arrangement | None,
    groups: Sequence[Params],
    states: Sequence[Params],
    scopes: Scopes,
    *,
    unrolled: bool,
) -> list[Stack]:
    """A stack for each group, inside `jax.shard_map`.

    Args:
        placement: The model on its mesh.
        arrangement: Which layers every rank has; None without stages.
        groups: Parameters of each group, this device's.
        states: The model's own state of each.
        scopes: Of its functions.
        unrolled: Whether parameters are layer by layer (`layer_by_layer`).
    """
    model = placement.model
    _, stored = model.split(placement.stored)
    blocks = [
        Block(group, stored=one_layer(stored[at]), remat="none", make_scope=scopes)
        for at, group in enumerate(model.groups)
    ]
    if arrangement is not None:
        layers = RankLayers(
            blocks=blocks,
            params=[()] * len(blocks) if unrolled else cut(groups, 1),
            states=cut(states, 1),
            arrangement=arrangement,
        )
        stacks = [layers.stack(at, jnp.int32(0)) for at in range(len(blocks))]
        if not unrolled:
            return stacks
        given = zip(stacks, groups, strict=True)
        return [replace(stack, shards=shards) for stack, shards in given]
    firsts = zip(blocks, model.first_layers, strict=True)
    return [
        Stack(
            block=block,
            shards=groups[at],
            state=states[at],
            layers=first + jnp.arange(block.group.num_layers, dtype=jnp.int32),
        )
        for at, (block, first) in enumerate(firsts)
    ]
