"""What the executor of a pipeline runs, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshpar.collectives import Zero


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the executor runs; all functions see this device's part.

    Args:
        stage: (chunk, microbatch, x) -> y, shaped as x, and sums of auxiliary losses.
        stage_keeping: The same -> those, and a tree of what its backward needs.
        stage_gradient: (chunk, microbatch, what was kept, dy, totals, whether it
            counts) -> dx, and the blocks' gradients added to the totals.
        embed: (microbatch, what to wait for) -> x of the first stage, by all ranks.
        embed_gradient: (microbatch, dx on the first stage's rank, else 0) -> gradients
            of the ends and of the microbatch's inputs, and what shows that it is done.
        head: (microbatch, y on the last stage's rank, else 0) -> (loss sums, dy,
            gradients of the ends, what shows that all is done), by all ranks.
        x: Shape of a microbatch's activations.
        spec: How they lie over automatic mesh axes.
        gradients: Shapes of the blocks' gradients, (chunks, ...) each.
        end_gradients: Of the ends' gradients.
        inputs: (microbatches, ...) each, what `embed_gradient` has gradients of.
        loss_sums: Shapes of the head's sums.
        auxiliary: Names of the auxiliary losses.
        gradient_dtype: In which gradients are added up.
    """

    stage: Callable[..., tuple[jax.Array, Any]]
    stage_keeping: Callable[..., tuple[jax.Array, Any, Any]]
    stage_gradient: Callable[..., tuple[jax.Array, Any]]
    embed: Callable[[jax.Array, Zero | None], jax.Array]
    embed_gradient: Callable[[jax.Array, jax.Array], tuple[Any, Any, Zero]]
    head: Callable[[jax.Array, jax.Array], tuple[Any, jax.Array, Any, Zero]]
    x: jax.ShapeDtypeStruct
    spec: PartitionSpec
    gradients: Any
    end_gradients: Any
    loss_sums: Any
    gradient_dtype: Any
    inputs: Any = ()
    auxiliary: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Results:
    """What every rank found, not yet summed over ranks: sums and unscaled gradients."""

    loss_sums: Any
    auxiliary: dict[str, jax.Array]
    block_gradients: Any
    end_gradients: Any
    input_gradients: Any
