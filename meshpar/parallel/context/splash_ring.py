"""Ring attention whose tiles are splash attention's: a TPU kernel at every hop.

In zigzag order a device has an early and a late chunk. Under a causal mask its late
queries see all early keys of another device, and either its early queries those too,
or its late ones the late keys: two chunks' full scores at each hop but the first,
whichever the devices, so that one kernel with a mask that is known serves all.
Softmaxes are merged by their log-sum-exp; the backward sends keys, values and their
gradients round once more, and gives the kernel the log-sum-exp of all scores.
Reference: Liu et al. 2023 (ring attention), section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.errors import InputError
from meshpar.model.token_order import TokenOrder
from meshpar.parallel.context.mask import Mask
from meshpar.parallel.context.shards import shifted
from meshpar.parallel.context.splash import Side, Splash, over_root, without_padding
from meshpar.parallel.context.tiles import by_part, named_results

# Dims: B batch, N heads, K kv heads, T tokens of a device, H head_dim, C two chunks.


EARLY, LATE = 0, 1
"""A device's chunks in zigzag order."""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The options of a ring.

    Args:
        order: Order of the tokens, zigzag if the mask is causal.
        causal: True if a query sees no key that follows it.
        num_parts: Parts of the kv heads that are moved one after another.
        interpret: True to run the kernel as JAX operations, without a TPU.

    Raises:
        InputError: The mask is causal, and the order not zigzag.
    """

    order: TokenOrder
    causal: bool
    num_parts: int = 1
    interpret: bool = False

    def __post_init__(self) -> None:
        if self.causal and not self.order.zigzag:
            raise InputError(
                "a causal ring of splash kernels takes zigzag order, but the devices "
                "have the sequence in its own; take attention in tiles",
                key="attention.causal_ring_without_zigzag",
            )


def splash_ring(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    *,
    rank: jax.Array,
    ring: Ring,
) -> jax.Array:
    """Return the attention of this device's queries to the keys of all devices.

    Over n devices, of K + V bytes on each, it sends (n-1) (K+V) forward, and backward
    (n-1) (K+V) and n times the fp32 gradients of both.

    Args:
        q: (batch, tokens, heads, head_dim), this device's.
        k: (batch, tokens, kv_heads, head_dim).
        v: As `k`.
        segments: As `splash_attention` takes them.
        rank: This device's place along the ring.
        ring: Options.

    Returns:
        (batch, tokens, heads, head_dim), the dtype of `q`; zeros for a query of a
        segment below 0.
    """

    def cut(x_BTNH: jax.Array) -> jax.Array:
        """Cut the heads into (parts, B, heads of one, T, H)."""
        batch, tokens, _, head_dim = x_BTNH.shape
        parts = x_BTNH.reshape(batch, tokens, ring.num_parts, -1, head_dim)
        return jnp.transpose(parts, (2, 0, 3, 1, 4))

    arrays = tuple(map(cut, (over_root(q), k, v)))
    mixed = by_part(lambda part: _attend(ring, *part, rank, segments), arrays)
    # (parts, B, N of one, T, H) -> BTNH
    mixed = jnp.transpose(mixed, (1, 3, 0, 2, 4)).reshape(q.shape)
    return without_padding(mixed, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, *arrays: Any) -> jax.Array:
    """Return BNTH of some heads, from q, k, v, the rank and the segments."""
    return _forward(ring, *arrays)[0]


def _forward(
    ring: Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rank: jax.Array,
    segments: jax.Array | None,
) -> tuple[jax.Array, tuple]:
    queries, keys = Side((q,), segments), Side((k, v), segments)
    # The next keys are on their way while these are met.
    later = shifted(ring.order, keys, 1)
    found = _kernel(ring, first=True).forward(queries, keys)
    state = found[0].astype(jnp.float32), found[1]

    def meet(state: tuple, keys: Side, hop: Any) -> tuple:
        earlier = (rank - hop) % ring.order.num_ranks < rank
        there, here = _pair(ring, queries, keys, earlier)
        return _merged(ring, state, _kernel(ring).forward(there, here), earlier)

    def body(carry: tuple, hop: Any) -> tuple[tuple, None]:
        state, keys = carry
        later = shifted(ring.order, keys, 1)
        return (meet(state, keys, hop), later), None

    last = ring.order.num_ranks - 1
    state, later = _scan(body, (state, later), range(1, last))
    output, lse = meet(state, later, last)
    output, lse = named_results(output.astype(q.dtype), lse)
    return output, (q, k, v, rank, segments, output, lse)


def _backward(ring: Ring, kept: tuple, dy: jax.Array) -> tuple:
    q, k, v, rank, segments, output, lse = kept
    queries, keys = Side((q, output, lse, dy), segments), Side((k, v), segments)
    # As in the forward; and what is added to keys' gradients is made while these move.
    later = shifted(ring.order, keys, 1)
    dq, *of_keys = _kernel(ring, first=True).backward(queries, keys)

    def meet(dq: jax.Array, keys: Side, of_keys: tuple, hop: Any) -> tuple:
        of_keys = shifted(ring.order, of_keys, 1, "context_ring_gradient")
        earlier = (rank - hop) % ring.order.num_ranks < rank
        there, here = _pair(ring, queries, keys, earlier)
        more, *more_of_keys = _kernel(ring).backward(there, here)
        dq = _added(ring, dq, more, earlier, of_keys=False)
        return dq, tuple(
            _added(ring, *both, earlier, of_keys=True)
            for both in zip(of_keys, more_of_keys, strict=True)
        )

    def body(carry: tuple, hop: Any) -> tuple[tuple, None]:
        dq, keys, of_keys = carry
        later = shifted(ring.order, keys, 1)
        dq, of_keys = meet(dq, keys, of_keys, hop)
        return (dq, later, of_keys), None

    wide = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    last = ring.order.num_ranks - 1
    carry = wide(dq), later, wide(tuple(of_keys))
    dq, keys, of_keys = _scan(body, carry, range(1, last))
    dq, of_keys = meet(dq, keys, of_keys, last)
    dk, dv = shifted(ring.order, of_keys, 1, "context_ring_gradient")
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_attend.defvjp(_forward, _backward)


def _kernel(ring: Ring, *, first: bool = False) -> Splash:
    """Return the kernel of the first hop, or of the others."""
    mask = Mask(causal=ring.causal and first)
    return Splash(mask=mask, interpret=ring.interpret)


def _pair(ring: Ring, queries: Side, keys: Side, earlier: Any) -> tuple[Side, Side]:
    """Return the chunks that meet at a hop, two of each: (2 batch, heads, chunk, ...).

    Late queries and early keys; and the early chunks of both, or the late of both.
    """
    if not ring.causal:
        return queries, keys

    def with_same(side: Side, chosen: int) -> Side:
        """Return a chunk of a side, and the chunk that meets its like."""

        def cut(x: jax.Array, dim: int) -> jax.Array:
            chunks = jnp.split(x, 2, dim)
            same = jnp.where(earlier, chunks[EARLY], chunks[LATE])
            return jnp.concatenate([chunks[chosen], same])

        segments = None if side.segments is None else cut(side.segments, 1)
        return Side(tuple(cut(x, 2) for x in side.arrays), segments)

    return with_same(queries, LATE), with_same(keys, EARLY)


def _merged(ring: Ring, state: tuple, found: tuple, earlier: Any) -> tuple:
    """Return outputs and log-sum-exp merged with those of more keys."""
    if not ring.causal:
        return _both(state, found)
    early, late = zip(*(jnp.split(x, 2, 2) for x in state), strict=True)
    of_late, of_same = zip(*(jnp.split(x, 2) for x in found), strict=True)
    late = _both(late, of_late)
    same = _both(_where(earlier, early, late), of_same)
    early, late = _where(earlier, same, early), _where(earlier, late, same)
    return tuple(jnp.concatenate(x, 2) for x in zip(early, late, strict=True))


def _both(one: tuple, other: tuple) -> tuple:
    lse = jnp.logaddexp(one[1], other[1])
    kept, added = (jnp.exp(x - lse)[..., None] for x in (one[1], other[1]))
    return one[0] * kept + other[0] * added, lse


def _added(
    ring: Ring, total: jax.Array, more: jax.Array, earlier: Any, *, of_keys: bool
) -> jax.Array:
    """Return a device's fp32 gradients with those of a hop's chunks added."""
    if not ring.causal:
        return total + more
    one, same = jnp.split(more.astype(jnp.float32), 2)
    early, late = jnp.where(earlier, same, 0), jnp.where(earlier, 0, same)
    early, late = (early + one, late) if of_keys else (early, late + one)
    return total + jnp.concatenate([early, late], 2)


def _where(condition: Any, one: tuple, other: tuple) -> tuple:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), one, other)


def _scan(body: Callable, carry: tuple, hops: range) -> tuple:
    if not hops:
        return carry
    return lax.scan(body, carry, jnp.asarray(list(hops), jnp.int32))[0]
