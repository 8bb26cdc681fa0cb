"""The layers that a rank has: of each group, those of one of its stages.

Every rank runs the same program, of each group as many places as the stage with most of
its layers; what differs from rank to rank is looked up in the arrangement's tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.parallel.blocks import Block, Stack
from meshpar.parallel.pipeline.ends import STAGE
from meshpar.parallel.pipeline.stages import NO_LAYER, Arrangement, part
from meshpar.parallel.pipeline.work import At

Fact = bool | jax.Array
"""Of this rank's stage; a plain boolean where it is the same of all stages."""


@dataclass(frozen=True, kw_only=True)
class RankLayers:
    """Where the layers of this rank's stages stand.

    Args:
        blocks: Of each group, what a layer does.
        params: Of each group, the parameters as stored, (chunks, places, ...).
        states: Of each group, its state, alike.
        arrangement: Which layers every rank has.
    """

    blocks: Sequence[Block]
    params: Sequence[Any]
    states: Sequence[Any]
    arrangement: Arrangement

    def stack(self, group: int, chunk: jax.Array) -> Stack:
        """The layers of a group that a stage of this rank has."""
        first = sum(block.group.num_layers for block in self.blocks[:group])
        return Stack(
            block=self.blocks[group],
            shards=jax.tree.map(lambda x: _chunk(x, chunk), self.params[group]),
            state=jax.tree.map(lambda x: _chunk(x, chunk), self.states[group]),
            layers=layers_here(self.arrangement, group, chunk, first=first),
        )

    def num_layers(self, group: int, at: At) -> jax.Array:
        """How many layers of a group the rank is to run."""
        found = np.count_nonzero(self.arrangement.layers[group] != NO_LAYER, axis=-1)
        here = jnp.asarray(found, jnp.int32)[lax.axis_index(STAGE)]
        return jnp.where(at.at_work, _chunk(here, at.chunk), 0)

    def holds(self, group: int, chunk: jax.Array) -> Fact:
        """Whether the stage has a layer of a group."""
        return _fact(self.arrangement.holds(group), chunk)

    def begins(self, group: int, chunk: jax.Array) -> Fact:
        """Whether it has the first one."""
        return _fact(self.arrangement.begins(group), chunk)

    def ends(self, group: int, chunk: jax.Array) -> Fact:
        """Whether its last layer is of a group."""
        return _fact(self.arrangement.ends(group), chunk)


def layers_here(
    arrangement: Arrangement, group: int, chunk: jax.Array, *, first: int
) -> jax.Array:
    """The layers of a group that a stage of this rank has, counted over all groups.

    Args:
        arrangement: Which layers every rank has.
        group: Which of the groups.
        chunk: Which of the rank's stages.
        first: The group's first layer.
    """
    layers = _chunk(
        jnp.asarray(arrangement.layers[group])[lax.axis_index(STAGE)], chunk
    )
    return jnp.where(layers >= 0, layers + first, layers) if first else layers


def _fact(table: np.ndarray, chunk: jax.Array) -> Fact:
    if table.all() or not table.any():
        return bool(table.all())
    return _chunk(jnp.asarray(table)[lax.axis_index(STAGE)], chunk)


def _chunk(value: jax.Array, chunk: jax.Array) -> jax.Array:
    if value.shape[0] == 1:
        return value[0]
    return part(value, chunk)
