"""What the executor of a pipeline runs, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

Payload = Any
"""What one stage hands to the next: a tuple of the streams that cross there."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the executor runs; all functions see this device's part.

    Args:
        stage: (chunk, microbatch, payload) -> payload, and sums of the blocks.
        stage_keeping: The same -> those, and a tree of what its backward needs.
        stage_gradient: (chunk, microbatch, what was kept, gradient of its payload,
            totals, whether it counts) -> gradient of the payload it took, the blocks'
            gradients added to the totals, and gradients of the ends (() for none).
        embed: microbatch -> payload of the first stage, by all ranks.
        embed_gradient: (microbatch, payload's gradient on the first stage's rank, else
            0) -> gradients of the ends and of the microbatch's inputs.
        head: (microbatch, payload on the last stage's rank, else 0) -> (loss sums,
            payload's gradient, gradients of the ends), by all ranks.
        payload: Shapes of a microbatch's payload.
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
    specs: Any
    gradients: Any
    end_gradients: Any
    loss_sums: Any
    auxiliary: Any
    statistics: Any
    inputs: Any = ()


@dataclass(frozen=True, kw_only=True)
class Results:
    """What every rank found, not yet summed over ranks: sums and unscaled gradients."""

    loss_sums: Any
    auxiliary: Any
    statistics: Any
    block_gradients: Any
    end_gradients: Any
    input_gradients: Any
