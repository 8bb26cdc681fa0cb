"""Attention on one device, or over a sequence split over `context`.

Memory is linear in the sequence on every path. A fused kernel runs where one fits
(`splash`, `models.layers.attention`); else tiles of our own (`tiles`), which the ring
needs anyway, as it merges softmaxes by their log-sum-exp.

*Ulysses* trades a split sequence for split heads by all-to-alls, and back. In between,
each device has whole sequences of some heads and attends as one device; or, if several
groups share a sequence, its group's tokens, and attends as one of the groups.
Reference: Jacobs et al. 2023 (DeepSpeed Ulysses), section 3; Fang and Zhao 2024 (USP),
on both at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked
from meshpar.errors import InputError
from meshpar.hardware.platforms import platform_named
from meshpar.layout.layout import ATTENTION_MIXED
from meshpar.model.scope import named_residual
from meshpar.model.token_order import TokenOrder
from meshpar.parallel.context.mask import Hops, Mask
from meshpar.parallel.context.shards import sharded_attention
from meshpar.parallel.context.splash_ring import Ring, splash_ring
from meshpar.parallel.context.tiles import Known, Plan
from meshpar.parallel.sizes import head_copies, head_parts, tile_tokens


def trade_tokens_for_heads(
    q: jax.Array, k: jax.Array, v: jax.Array, order: TokenOrder
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values of some heads, for all tokens of a group.

    One all-to-all each: of n devices a device sends (n-1)/n of its values. Fewer kv
    heads than devices are sent once to every device whose queries they serve.

    Args:
        q: (batch, tokens, heads, head_dim), this device's tokens.
        k: (batch, tokens, kv_heads, head_dim).
        v: As `k`.
        order: Order of the tokens, in groups of `order.heads` devices.

    Raises:
        InputError: The heads do not divide over the devices.
    """
    heads, kv_heads, n = q.shape[2], k.shape[2], order.heads
    if heads % n:
        raise InputError(
            f"attention={order.text} splits heads over {n} devices, but each has "
            f"{heads} of them; take attention=ring or allgather, or as many devices as "
            "divide the heads",
            key="attention.indivisible_heads",
        )
    times = head_copies(heads, kv_heads, n)
    k, v = (jnp.repeat(x, times, axis=2) if times > 1 else x for x in (k, v))
    with asked("context_heads"):
        q, k, v = (_trade(x, order, split_axis=2, concat_axis=1) for x in (q, k, v))
        return q, k, v


def trade_heads_for_tokens(y: jax.Array, order: TokenOrder) -> jax.Array:
    """Return all heads of this device's tokens, from some heads: one all-to-all."""
    with asked("context_heads"):
        return _trade(y, order, split_axis=1, concat_axis=2)


def _trade(x: jax.Array, order: TokenOrder, **axes: int) -> jax.Array:
    return lax.all_to_all(
        x, order.mesh_axis, **axes, tiled=True, axis_index_groups=order.trading()
    )


def shard_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    order: TokenOrder | None = None,
    rank: jax.Array | int = 0,
    q_segments: jax.Array | None = None,
    k_segments: jax.Array | None = None,
    prefix: jax.Array | None = None,
    sinks: jax.Array | None = None,
    whole: Callable[..., jax.Array] | None = None,
    platform: str = "",
) -> jax.Array:
    """Return the attention of this device's queries to the keys of all devices.

    Communicates as `sharded_attention` if keys move, as `trade_tokens_for_heads` and
    back if heads are traded, and as both between groups of devices that trade heads.

    Args:
        q: (batch, tokens, heads, head_dim).
        k: (batch, keys, kv_heads, head_dim); each head serves as many queries' in turn.
        v: As `k`.
        mask: Which keys a query sees by their places.
        order: How devices share the sequence; None if each has all of it.
        rank: This device's place among them.
        q_segments: (batch, tokens) int32: a query sees only keys of its own number,
            and none if that is below 0. None if all are one document.
        k_segments: (batch, keys) int32, alike.
        prefix: (batch,) int32: the number of first tokens that all queries see.
        sinks: (heads,) of logits that take part in each softmax with a value of 0
            (OpenAI 2025, gpt-oss); None for none.
        whole: Attention of (q, k, v) for a device that has whole sequences, as between
            the all-to-alls of Ulysses; tiles by default. It is for sequences without
            padding, prefix and sinks; with documents it takes (batch, tokens) of their
            numbers too.
        platform: Kind of device, which gives the size of tiles
            (`Platform.largest_tile`); empty for none in particular.

    Returns:
        (batch, tokens, heads, head_dim), the dtype of `v`; zeros where a query sees no
        key.

    Raises:
        InputError: A sliding window and a prefix at once, a prefix without
            `Mask(prefix=True)` or the other way round, or documents of queries or keys
            alone.
    """
    if order is not None and order.probing:
        mixed = jnp.broadcast_to(q[..., :1], (*q.shape[:3], v.shape[3]))
        return named_residual(mixed, ATTENTION_MIXED)
    if mask.window is not None and prefix is not None:
        raise InputError(
            f"window={mask.window} and a prefix at once: which of the prefix a window "
            "leaves is not defined; leave one of them out",
            key="attention.window_with_prefix",
        )
    if mask.prefix != (prefix is not None):
        given = "None" if prefix is None else "an array"
        raise InputError(
            f"Mask(prefix={mask.prefix}) with prefix={given}: give both, or neither",
            key="attention.prefix_and_mask_differ",
        )
    if (q_segments is None) != (k_segments is None):
        raise InputError(
            "q_segments and k_segments: one is None and the other is not; give both, "
            "or neither",
            key="attention.segments_of_one_side",
        )
    known = Known(jnp.asarray(rank, jnp.int32), q_segments, k_segments, prefix)
    if order is not None and order.heads > 1:
        return _by_heads(q, k, v, mask, order, known, sinks, whole, platform)
    output, lse = _in_tiles(q, k, v, mask, order, known, platform)
    return output if sinks is None else _with_sinks(output, lse, sinks)


def kernel_ring(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    order: TokenOrder,
    rank: jax.Array,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Return `shard_attention` by a ring of a TPU's kernel (`splash_ring`)."""
    key_bytes = k.size * k.dtype.itemsize
    parts = head_parts(k.shape[2], key_bytes, order.num_ranks, gathers=False)
    ring = Ring(order=order, causal=mask.causal, num_parts=parts)
    return splash_ring(q, k, v, segments, rank=rank, ring=ring)


def _in_tiles(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    order: TokenOrder | None,
    known: Known,
    platform: str,
) -> tuple[jax.Array, jax.Array]:
    num_ranks, gathers, zigzag = 1, False, False
    if order is not None:
        num_ranks, zigzag = order.num_ranks, order.zigzag
        gathers = num_ranks > 1 and order.across.gathers
    key_bytes = k.size * k.dtype.itemsize
    parts = head_parts(k.shape[2], key_bytes, num_ranks, gathers=gathers)
    rows = q.shape[0] * q.shape[2] // parts
    largest = platform_named(platform).largest_tile
    plan = Plan(
        hops=Hops(
            mask=mask,
            order=order,
            queries=q.shape[1],
            keys=k.shape[1],
            tiles=(
                tile_tokens(q.shape[1], rows, zigzag=zigzag, largest=largest),
                tile_tokens(k.shape[1], rows, zigzag=zigzag, largest=largest),
            ),
        ),
        gathers=gathers,
        num_parts=parts,
    )
    return sharded_attention(plan, q, k, v, known)


def _by_heads(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    order: TokenOrder,
    known: Known,
    sinks: jax.Array | None,
    kernel: Callable[..., jax.Array] | None,
    platform: str,
) -> jax.Array:
    heads, groups = q.shape[2] // order.heads, order.group_order()
    q, k, v = trade_tokens_for_heads(q, k, v, order)
    whole = functools.partial(_gather_segments, order=order)
    if kernel is not None and groups.num_ranks == 1 and not order.lengths:
        segments = whole(known.q_segments)
        more = () if segments is None else (segments,)
        return trade_heads_for_tokens(kernel(q, k, v, *more), order)
    here = known._replace(
        rank=known.rank // order.heads,
        q_segments=whole(known.q_segments),
        k_segments=whole(known.k_segments),
    )
    output, lse = _in_tiles(q, k, v, mask, groups, here, platform)
    if sinks is not None:
        first = known.rank % order.heads * heads
        own = lax.dynamic_slice_in_dim(sinks, first, heads)
        output = _with_sinks(output, lse, own)
    return trade_heads_for_tokens(output, order)


def _gather_segments(segments: jax.Array | None, order: TokenOrder) -> jax.Array | None:
    """Return the document numbers of all tokens of a group."""
    if segments is None:
        return None
    with asked("context_gather"):
        return lax.all_gather(
            segments,
            order.mesh_axis,
            axis=1,
            tiled=True,
            axis_index_groups=order.trading(),
        )


def _with_sinks(output: jax.Array, lse: jax.Array, sinks: jax.Array) -> jax.Array:
    share = jax.nn.sigmoid(lse - sinks.astype(jnp.float32))
    return (output.astype(jnp.float32) * share[..., None]).astype(output.dtype)
