"""What a pipeline's ticks hand on: buffers of payloads, stashes, and sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.parallel.pipeline.crossing import Hops, Payload, zero_arrays
from meshpar.parallel.pipeline.work import Results, Work
from meshpar.schedules import TickTable


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
