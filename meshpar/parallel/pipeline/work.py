"""What the executor of a pipeline runs, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

Payload = Any
"""What one stage hands to the next: a tuple of the streams that cross there."""


@dataclass(frozen=True)
class At:
    """What a rank is to run in a tick, forward or backward.

    Args:
        chunk: Which of its stages, int32.
        microbatch: Of what, int32.
        at_work: Whether it is to run anything: what it computes counts.
    """

    chunk: jax.Array
    microbatch: jax.Array
    at_work: jax.Array


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the executor runs; all functions see this device's part.

    Args:
        stage: (`At`, payload) -> payload, and sums of the blocks.
        stage_keeping: (`At`, payload, buffers, slot) -> those, and the buffers with
            what its backward needs in that slot.
        stage_gradient: (`At`, buffers, slot, gradient of its payload, totals) ->
            gradient of the payload it took, the blocks' gradients added to the totals,
            and gradients of the ends (() for none).
        embed: microbatch -> payload of the first stage, by all ranks.
        embed_gradient: (microbatch, payload's gradient on the first stage's rank, else
            0) -> gradients of the ends and of the microbatch's inputs.
        head: (microbatch, payload on the last stage's rank, else 0) -> (loss sums,
            payload's gradient, gradients of the ends), by all ranks.
        payload: Shapes of a microbatch's payload.
        kept: Shapes of what a stage keeps of one microbatch, a tree.
        specs: How its arrays lie over automatic mesh axes.
        gradients: Shapes of the blocks' gradients, (chunks, ...) each.
        end_gradients: Of the ends' gradients.
        loss_sums: Of the head's sums.
        auxiliary: Of the blocks' auxiliary losses, scalars.
        statistics: Of the blocks' other sums, (chunks, ...) each.
        inputs: (microbatches, ...) each, what `embed_gradient` has gradients of.
    """

    stage: Callable[..., tuple[Payload, Any]]
    stage_keeping: Callable[..., tuple[Payload, Any, Any]]
    stage_gradient: Callable[..., tuple[Payload, Any, Any]]
    embed: Callable[[jax.Array], Payload]
    embed_gradient: Callable[[jax.Array, Payload], tuple[Any, Any]]
    head: Callable[[jax.Array, Payload], tuple[Any, Payload, Any]]
    payload: Any
    kept: Any
    specs: Any
    gradients: Any
    end_gradients: Any
    loss_sums: Any
    auxiliary: Any
    statistics: Any
    inputs: Any = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Results:
    """What every rank found, not yet summed over ranks: sums and unscaled gradients."""

    block_gradients: Any
    end_gradients: Any
    input_gradients: Any
    loss_sums: Any
    auxiliary: Any
    statistics: Any
