"""The stages of one rank, for one microbatch at a time, as the executor calls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.parallel.block import Block, Sums
from meshpar.parallel.blocks import (
    check_names,
    run_again,
    run_backward,
    run_blocks,
    run_keeping,
)
from meshpar.parallel.pipeline.ends import STAGE
from meshpar.parallel.pipeline.stages import Arrangement, part


@dataclass(frozen=True, kw_only=True)
class RankStages:
    """The blocks of every stage that this rank runs.

    Args:
        block: What a layer does.
        blocks: The parameters as stored, (chunks, places, ...).
        arrangement: Which layers every rank has.
        inputs: Microbatch -> arrays without gradient that scopes are made of.
        keeps_input: Whether a stage's input is all that is kept for its backward.
    """

    block: Block
    blocks: Any
    arrangement: Arrangement
    inputs: Callable[[jax.Array], dict[str, Any]]
    keeps_input: bool = False

    def run(
        self, chunk: jax.Array, microbatch: jax.Array, x: jax.Array
    ) -> tuple[jax.Array, Sums]:
        """A microbatch through one of the stages, and its auxiliary losses."""
        return run_blocks(self.block, *self._of(chunk, x, microbatch))

    def run_keeping(
        self, chunk: jax.Array, microbatch: jax.Array, x: jax.Array
    ) -> tuple[jax.Array, Sums, Any]:
        """The same, and what `gradient` needs of it."""
        if self.keeps_input:
            return *self.run(chunk, microbatch, x), x
        shards, x, layers, inputs = self._of(chunk, x, microbatch)
        check_names([(self.block, layers, shards)], x, inputs)
        return run_keeping(self.block, shards, x, layers, inputs)

    def gradient(
        self,
        chunk: jax.Array,
        microbatch: jax.Array,
        kept: Any,
        dy: jax.Array,
        totals: Any,
        counts: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """The gradient of the stage's input; its parameters' are added to the totals.

        Args:
            chunk: Which of the rank's stages.
            microbatch: Of what.
            kept: By `run_keeping`.
            dy: Gradient of the stage's output.
            totals: Where gradients are added, (chunks, places, ...).
            counts: Whether they are to be added.
        """

        def add(totals: Any, gradients: Any, place: jax.Array) -> Any:
            return jax.tree.map(
                lambda total, gradient: total.at[chunk, place].add(
                    jnp.where(counts, gradient.astype(total.dtype), 0)
                ),
                totals,
                gradients,
            )

        shards, dy, layers, inputs = self._of(chunk, dy, microbatch)
        backward = run_again if self.keeps_input else run_backward
        return backward(self.block, shards, kept, dy, layers, inputs, totals, add)

    def _of(self, chunk: jax.Array, x: jax.Array, microbatch: jax.Array) -> tuple:
        layers = jnp.asarray(self.arrangement.layers)[lax.axis_index(STAGE)]
        shards = jax.tree.map(lambda value: _chunk(value, chunk), self.blocks)
        return shards, x, _chunk(layers, chunk), self.inputs(microbatch)


def _chunk(value: jax.Array, chunk: jax.Array) -> jax.Array:
    if value.shape[0] == 1:
        return value[0]
    return part(value, chunk)
