"""The functions that the executor of a pipeline runs, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from meshpar.parallel.pipeline.crossing import Payload


@dataclass(frozen=True)
class At:
    """A rank's forward or backward of a tick.

    Args:
        chunk: Index among the rank's stages, int32.
        microbatch: Index of the microbatch, int32.
        is_active: Whether the rank has work; else its results are dropped.
    """

    chunk: jax.Array
    microbatch: jax.Array
    is_active: jax.Array


class SplitWork(NamedTuple):
    """The functions of a split backward.

    Args:
        input_gradient: (`At`, buffers, slot, gradient of its payload, stash, its slot)
            -> gradient of the payload it took, the stash with what the weight gradient
            needs in that slot, and gradients of the ends (() for none).
        weight_gradient: (`At`, stash, slot, totals) -> the blocks' gradients added to
            the totals.
        stash: Shapes of what one input gradient leaves, a tree.
    """

    input_gradient: Callable[..., tuple[Payload, Any, Any]]
    weight_gradient: Callable[..., Any]
    stash: Any


@dataclass(frozen=True, kw_only=True)
class Work:
    """The functions that the executor runs, each on this device's part.

    Args:
        stage: (`At`, payload) -> payload, and sums of the blocks.
        stage_keeping: (`At`, payload, buffers, slot) -> those, and the buffers with
            what its backward needs in that slot.
        stage_gradient: (`At`, buffers, slot, gradient of its payload, totals) ->
            gradient of the payload it took, the blocks' gradients added to the totals,
            and gradients of the ends (() for none).
        last_gradient: The same with the chunks to reduce and what is communicated
            beside them; it returns this too. None if nothing is reduced in the ticks.
        reduce_ends: Gradients of the ends -> those, the head's reduced.
        embed: microbatch -> payload of the first stage, by all ranks.
        embed_gradient: (microbatch, payload's gradient on the first stage's rank, else
            0) -> gradients of the ends and of the microbatch's inputs.
        head: (microbatch, payload on the last stage's rank, else 0) -> (loss sums,
            payload's gradient, gradients of the ends), by all ranks.
        payload: Shapes of a microbatch's payload.
        kept: Shapes of what a stage keeps of one microbatch, a tree.
        specs: How a payload's arrays lie over automatic mesh axes.
        gradients: Shapes of the blocks' gradients, (chunks, ...) each.
        end_gradients: Shapes of the ends' gradients.
        loss_sums: Shapes of the head's sums.
        auxiliary: Shapes of the blocks' auxiliary losses, scalars.
        statistics: Shapes of the blocks' other sums, (chunks, ...) each.
        inputs: Inputs that have a gradient, (microbatches, ...) each.
        split: The two halves of `stage_gradient`; None if backwards are whole.
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
    last_gradient: Callable[..., tuple[Payload, Any, Any, Any]] | None = None
    reduce_ends: Callable[[Any], Any] | None = None
    split: SplitWork | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Results:
    """Sums and unscaled gradients of a rank, not yet summed over the ranks."""

    block_gradients: Any
    end_gradients: Any
    input_gradients: Any
    loss_sums: Any
    auxiliary: Any
    statistics: Any
