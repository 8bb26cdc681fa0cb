"""Attention of this device's queries to the keys of all: ring, and gather by heads.

*Ring*: keys and values go from device to device, while each meets the queries there;
the backward sends them round once more, and their gradients with them, back to where
they belong. *Gather*: a few heads' keys and values at a time are gathered whole. Either
keeps its own inputs, output and log-sum-exp for the backward, and no scores.
Reference: Liu et al. 2023 (ring attention), section 3; Llama team 2024, section 3.3.2
(gathered keys and values).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked
from meshpar.model.token_order import TokenOrder
from meshpar.parallel.context.mask import Hops, Marks
from meshpar.parallel.context.tiles import (
    Backward,
    Keys,
    Known,
    Plan,
    Queries,
    Running,
    attend,
    by_part,
    gradients,
    in_parts,
    joined,
    named_results,
    segment_tiles,
    tiled,
    tiled_keys,
)


def shifted(
    order: TokenOrder | None, tree: Any, distance: int, reason: str = "context_ring"
) -> Any:
    """Return the arrays of the device `distance` places before this one.

    One permute of each: this device sends the bytes of its arrays once; the backward
    sends as many back.

    Args:
        order: Order of the tokens; None if a device has all.
        tree: This device's arrays.
        distance: Places along the ring.
        reason: A name in `meshpar.collectives.ASKED`.
    """
    if order is None or distance % order.num_ranks == 0:
        return tree
    with asked(reason):
        return lax.ppermute(tree, order.mesh_axis, order.hop(distance))


def shifted_both(order: TokenOrder | None, moved: tuple, distance: int) -> tuple:
    """Return `shifted` keys and values, and their gradients."""
    keys, of_keys = moved
    return (
        shifted(order, keys, distance),
        shifted(order, of_keys, distance, "context_ring_gradient"),
    )


# Dims: as in `tiling`.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sharded_attention(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, known: Known
) -> tuple[jax.Array, jax.Array]:
    """Return attention, and the log-sum-exp of its scores.

    Over n devices, of K + V bytes on each: the ring sends (n-1) (K+V) forward, and
    backward (n-1) (K+V) and n times the fp32 gradients of both; the gather receives
    (n-1) (K+V) forward and backward, and reduce-scatters (n-1) times the fp32
    gradients. Hops that no query needs, of a window, are left out of the ring.

    Args:
        plan: The hops, and the way keys move.
        q: (batch, tokens, heads, head_dim), this device's.
        k: (batch, keys, kv_heads, head_dim).
        v: As `k`.
        known: Arrays of the mask.

    Returns:
        (batch, tokens, heads, head_dim) in the dtype of `v`, zeros where a query sees
        no key; fp32 (batch, tokens, heads).
    """
    return _forward(plan, q, k, v, known)[0]


def _forward(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, known: Known
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    run = _gather_forward if plan.gathers else _ring_forward

    def part(arrays: tuple) -> tuple[jax.Array, jax.Array]:
        (q, k, v), here = _held(arrays, known)
        found = run(plan.hops, _queries(plan, q, here), k, v, here)
        output, lse = found.result()
        return output.astype(v.dtype), lse

    cut = in_parts(plan, (tiled(plan, q, k.shape[2]), *tiled_keys(plan, k, v)))
    output, lse = by_part(part, cut)
    output = joined(output, q.shape)
    lse = joined(lse[..., None], (*q.shape[:3], 1))[..., 0]
    output, lse = named_results(output, lse)
    return (output, lse), (q, k, v, known, output, lse)


def _backward(plan: Plan, kept: tuple, cotangents: tuple) -> tuple:
    q, k, v, known, output, lse = kept
    dy, dlse = cotangents
    run = _gather_backward if plan.gathers else _ring_backward
    delta = jnp.sum(dy.astype(jnp.float32) * output.astype(jnp.float32), -1) - dlse
    kv_heads = k.shape[2]

    def part(arrays: tuple) -> tuple:
        (q, dy, lse, delta, k, v), here = _held(arrays, known)
        queries = _queries(plan, q, here)._replace(
            backward=Backward(dy, lse[..., 0], delta[..., 0])
        )
        dq, of_keys = run(plan.hops, queries, k, v, here)
        # What all parts leave is in the dtype of the arrays, a half of fp32's.
        dk, dv = (x.astype(k.dtype) for x in of_keys)
        return dq.astype(q.dtype), (dk, dv)

    of_queries = (q, dy, lse[..., None], delta[..., None])
    cut = (*(tiled(plan, x, kv_heads) for x in of_queries), *tiled_keys(plan, k, v))
    dq, (dk, dv) = by_part(part, in_parts(plan, cut))
    return (
        joined(dq, q.shape),
        joined(dk[:, :, :, :, None], k.shape),
        joined(dv[:, :, :, :, None], v.shape),
        None,
    )


sharded_attention.defvjp(_forward, _backward)


def _held(arrays: tuple, known: Known) -> tuple[tuple, Known]:
    """Return the same arrays behind a barrier, none ready before the others.

    Masks follow from places alone: JAX would split off their part of a loop, and XLA
    would move it out of an outer one, and both would keep the masks of all tiles.
    """
    return lax.optimization_barrier((arrays, known))


def _ring_forward(
    hops: Hops, queries: Queries, k: jax.Array, v: jax.Array, known: Known
) -> Running:
    def step(running: Running, keys: tuple, hop: Any, pairs: jax.Array) -> Running:
        met = _met(hops, keys, hop, known)
        return attend(hops.mask, running, queries, met, pairs, known.prefix)

    running, keys = Running.start(queries.q), (k, v, _tiled_segments(hops, known))
    if not hops.is_ring:
        at = 0
        for hop in hops.needed:
            keys, at = shifted(hops.order, keys, hop - at), hop
            running = step(running, keys, hop, hops.pairs((hop,), known.rank)[0])
        return running
    # The next keys are on their way while these are met.
    later = shifted(hops.order, keys, 1)
    running = step(running, keys, 0, hops.pairs((0,), known.rank)[0])
    inner, last = hops.needed[1:-1], hops.needed[-1]

    def onward(state: tuple, hop: Any, pairs: jax.Array) -> tuple:
        running, keys = state
        later = shifted(hops.order, keys, 1)
        return step(running, keys, hop, pairs), later

    running, keys = _in_loop(hops, onward, (running, later), inner, known)
    return step(running, keys, last, hops.pairs((last,), known.rank)[0])


def _ring_backward(
    hops: Hops, queries: Queries, k: jax.Array, v: jax.Array, known: Known
) -> tuple:
    def step(dq: jax.Array, moved: tuple, hop: Any, pairs: jax.Array) -> tuple:
        keys, of_keys = moved
        met = _met(hops, keys, hop, known)
        dq, of_keys = gradients(
            hops.mask, dq, of_keys, queries, met, pairs, known.prefix
        )
        return dq, (keys, of_keys)

    dq = jnp.zeros(queries.q.shape, jnp.float32)
    of_keys = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    keys = k, v, _tiled_segments(hops, known)
    if not hops.is_ring:
        moved, at = (keys, of_keys), 0
        for hop in hops.needed:
            moved, at = shifted_both(hops.order, moved, hop - at), hop
            dq, moved = step(dq, moved, hop, hops.pairs((hop,), known.rank)[0])
        return dq, shifted(hops.order, moved[1], -at, "context_ring_gradient")
    # As in the forward; and keys' gradients of a hop are made while the earlier move.
    later, none = shifted(hops.order, keys, 1), of_keys
    first = hops.pairs((0,), known.rank)[0]
    dq, (_, of_keys) = step(dq, (keys, none), 0, first)

    def meet(dq: jax.Array, keys: tuple, of_keys: tuple, hop: Any, pairs: Any) -> tuple:
        of_keys = shifted(hops.order, of_keys, 1, "context_ring_gradient")
        dq, (_, more) = step(dq, (keys, none), hop, pairs)
        return dq, jax.tree.map(jnp.add, of_keys, more)

    def onward(state: tuple, hop: Any, pairs: jax.Array) -> tuple:
        dq, keys, of_keys = state
        later = shifted(hops.order, keys, 1)
        dq, of_keys = meet(dq, keys, of_keys, hop, pairs)
        return dq, later, of_keys

    inner, last = hops.needed[1:-1], hops.needed[-1]
    dq, keys, of_keys = _in_loop(hops, onward, (dq, later, of_keys), inner, known)
    pairs = hops.pairs((last,), known.rank)[0]
    dq, of_keys = meet(dq, keys, of_keys, last, pairs)
    return dq, shifted(hops.order, of_keys, 1, "context_ring_gradient")


def _gather_forward(
    hops: Hops, queries: Queries, k: jax.Array, v: jax.Array, known: Known
) -> Running:
    whole = _gather(hops, (k, v, _tiled_segments(hops, known)))

    def step(running: Running, hop: Any, pairs: jax.Array) -> Running:
        met = _met(hops, _source_part(hops, whole, hop, known), hop, known)
        return attend(hops.mask, running, queries, met, pairs, known.prefix)

    return _over_hops(hops, step, Running.start(queries.q), known)


def _gather_backward(
    hops: Hops, queries: Queries, k: jax.Array, v: jax.Array, known: Known
) -> tuple:
    whole = _gather(hops, (k, v, _tiled_segments(hops, known)))

    def step(found: tuple, hop: Any, pairs: jax.Array) -> tuple:
        dq, total = found
        source = (known.rank - hop) % hops.num_ranks
        of_keys = jax.tree.map(lambda x: x[source], total)
        met = _met(hops, _source_part(hops, whole, hop, known), hop, known)
        dq, of_keys = gradients(
            hops.mask, dq, of_keys, queries, met, pairs, known.prefix
        )
        return dq, jax.tree.map(lambda x, y: x.at[source].set(y), total, of_keys)

    dq = jnp.zeros(queries.q.shape, jnp.float32)
    total = tuple(jnp.zeros(x.shape, jnp.float32) for x in whole[:2])
    dq, total = _over_hops(hops, step, (dq, total), known)
    with asked("context_scatter"):
        return dq, tuple(
            lax.psum_scatter(x, **_members(hops), scatter_dimension=0) for x in total
        )


def _over_hops(hops: Hops, step: Callable[..., Any], state: Any, known: Known) -> Any:
    """Run `step` at each hop; those after the first, all alike, in a loop."""
    first, rest = hops.needed[:1], hops.needed[1:]
    for hop in first:
        state = step(state, hop, hops.pairs((hop,), known.rank)[0])
    return _in_loop(hops, step, state, rest, known) if rest else state


def _in_loop(
    hops: Hops,
    step: Callable[..., Any],
    state: Any,
    chosen: tuple[int, ...],
    known: Known,
) -> Any:
    table = hops.pairs(chosen, known.rank)
    at = jnp.asarray(chosen, jnp.int32), table
    return lax.scan(lambda state, at: (step(state, *at), None), state, at)[0]


def _met(hops: Hops, keys: tuple, hop: Any, known: Known) -> Keys:
    """Return the keys that the queries meet at a hop, and their positions."""
    k, v, segments = keys
    source = (known.rank - hop) % hops.num_ranks
    return Keys(k, v, Marks(hops.positions(source, of_keys=True), segments))


def _source_part(hops: Hops, whole: tuple, hop: Any, known: Known) -> tuple:
    source = (known.rank - hop) % hops.num_ranks
    return jax.tree.map(lambda x: x[source], whole)


def _queries(plan: Plan, q: jax.Array, known: Known) -> Queries:
    hops = plan.hops
    segments = segment_tiles(known.q_segments, hops.tiles[0])
    return Queries(q, Marks(hops.positions(known.rank, of_keys=False), segments))


def _tiled_segments(hops: Hops, known: Known) -> jax.Array | None:
    return segment_tiles(known.k_segments, hops.tiles[1])


def _gather(hops: Hops, tree: Any) -> Any:
    """Gather all devices' arrays: (ranks, ...)."""
    with asked("context_gather"):
        return jax.tree.map(lambda x: lax.all_gather(x, **_members(hops)), tree)


def _members(hops: Hops) -> dict[str, Any]:
    """Return the collective's arguments for the devices that share the sequence."""
    order = cast(TokenOrder, hops.order)
    return {"axis_name": order.mesh_axis, "axis_index_groups": order.sharing()}
