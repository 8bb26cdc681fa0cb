"""The functions that the executor of a pipeline runs, its state, and its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.parallel.pipeline.crossing import Hops, Payload, zero_arrays
from meshpar.schedules import TickTable


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
        pair: (arguments of `stage_keeping`, those of `stage_gradient` or of
            `SplitWork.input_gradient`, `Executor.once_known`) -> results of both, whose
            layers run side by side; None if a tick's forward comes first.
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
    pair: Callable[..., tuple[tuple, tuple]] | None = None


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TickState:
    """The loop's carry from one tick to the next."""

    inputs: Payload
    gradients: Payload
    downward: Payload
    upward: Payload
    saved: Any
    stash: Any
    results: Results
    weights: Any = ()


class Learning(Protocol):
    """Weights that change from tick to tick, in `TickState.weights`."""

    def first(self) -> Any:
        """Return the weights before the first tick."""

    def rows(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return what the other functions read of those ticks, (ticks, ...) each."""

    def work(self, weights: Any, row: dict[str, jax.Array]) -> Work:
        """Return the functions of a tick, with the weights that its actions use."""

    def learned(
        self,
        state: TickState,
        row: dict[str, jax.Array],
        once_known: Callable[..., Any],
    ) -> TickState:
        """Return the state with weights updated by a tick's gradients, now zeros.

        Args:
            state: After the tick.
            row: The tick.
            once_known: `Executor.once_known`, for collectives of the update.
        """


def first_state(
    work: Work, table: TickTable, hops: Hops, *, divergent: bool, keeps: bool
) -> TickState:
    """Return zeros, in as many slots as the ticks need.

    Args:
        work: Shapes of what is kept.
        table: The ticks.
        hops: How payloads lie.
        divergent: True if activations wait for the next tick.
        keeps: True if backwards follow.
    """

    def buffer(slots: tuple[int, ...], shape: Any) -> jax.Array:
        return jnp.zeros((max(max(slots), 1), *shape.shape), shape.dtype)

    def buffers(slots: tuple[int, ...]) -> Payload:
        zeros = jax.tree.map(lambda shape: buffer(slots, shape), work.payload)
        return hops.laid_out(zeros)

    payload = hops.laid_out(zero_arrays(work.payload))
    stash = work.split.stash if work.split is not None and keeps else ()
    return TickState(
        inputs=buffers(table.input_slots),
        gradients=buffers(table.gradient_slots),
        downward=payload if keeps else (),
        upward=payload if divergent else (),
        stash=jax.tree.map(lambda shape: buffer(table.stash_slots, shape), stash),
        saved=jax.tree.map(
            lambda shape: buffer(table.saved_slots, shape),
            work.kept if keeps else (),
        ),
        results=Results(
            block_gradients=zero_arrays(work.gradients if keeps else ()),
            end_gradients=_first_end_gradients(work) if keeps else (),
            input_gradients=zero_arrays(work.inputs if keeps else ()),
            loss_sums=zero_arrays(work.loss_sums),
            auxiliary=zero_arrays(work.auxiliary),
            statistics=zero_arrays(work.statistics),
        ),
    )


def _first_end_gradients(work: Work) -> Any:
    """Return zeros, which XLA:GPU makes apart from those of the last tick.

    It made both at once, and kept those of the last tick through all others.
    """
    zero = jnp.float32(0)
    if work.last_gradient is not None:
        zero = lax.optimization_barrier(zero)
    return jax.tree.map(
        lambda shape: jnp.broadcast_to(zero.astype(shape.dtype), shape.shape),
        work.end_gradients,
    )


def with_forward(state: TickState, at: At, sums: Any, saved: Any) -> TickState:
    """Return the state with a forward's sums added, and what it kept.

    Args:
        state: The state.
        at: The forward.
        sums: Auxiliary losses and statistics of its blocks.
        saved: The buffers with what its backward needs.
    """
    (auxiliary, statistics), before = sums, state.results
    results = replace(
        before,
        auxiliary=add_counted(before.auxiliary, auxiliary, at.is_active),
        statistics=_add_at(before.statistics, at.chunk, statistics, at.is_active),
    )
    return replace(state, saved=saved, results=results)


def add_counted(total: Any, more: Any, counts: jax.Array) -> Any:
    """Add where it counts; what does not count may be NaN. None adds nothing."""

    def add(one: jax.Array, other: jax.Array | None) -> jax.Array:
        if other is None:
            return one
        return one + jnp.where(counts, other.astype(one.dtype), 0)

    return jax.tree.map(add, total, more)


def _add_at(total: Any, chunk: jax.Array, more: Any, counts: jax.Array) -> Any:
    """Add to the part of one chunk where it counts."""
    return jax.tree.map(
        lambda one, other: one.at[chunk].add(
            jnp.where(counts, other.astype(one.dtype), 0)
        ),
        total,
        more,
    )
