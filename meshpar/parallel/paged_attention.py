"""Attention of new tokens to pages of keys and values, with memory for some pages.

A sequence's keys lie in pages of a few tokens, anywhere in a pool (Kwon et al. 2023,
"PagedAttention", section 4). They are read some pages at a time with the online softmax
of Milakov and Gimelshein 2018, for as many tokens as the longest sequence at hand has.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked

_UNSEEN = -1e30
_TOKENS_AT_A_TIME = 512

# Dims: B examples, T new tokens, N heads, K kv heads, G heads for each, H head_dim,
# P pages of a pool, A pages read at a time, O tokens of a page, S = A x O.


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Where a device's examples have their pages.

    Args:
        page_size: Tokens of a page.
        window: A query sees keys less than so many places before it; None for no limit.
        ring: Pages that an example uses in turn; None where a table says which it has.
        num_ranks: Devices of `mesh_axis`, which have every so-many-th page.
        mesh_axis: The mesh axis that splits sequences.
    """

    page_size: int
    window: int | None = None
    ring: int | None = None
    num_ranks: int = 1
    mesh_axis: str = "context"

    @property
    def rank(self) -> jax.Array | int:
        """This device's place along the mesh axis."""
        return lax.axis_index(self.mesh_axis) if self.num_ranks > 1 else 0

    def physical(self, owners: jax.Array, local: jax.Array) -> jax.Array:
        """Pages of the pool, from an example's own count of the pages that are here.

        Args:
            owners: Tables (B, pages of an example), or first pages (B, 1) of rings.
            local: (B, n), the count; -1 for none.

        Returns:
            (B, n); -1 for none.
        """
        if self.ring is not None:
            found = owners + local % self.ring
        else:
            last = owners.shape[1] - 1
            found = jnp.take_along_axis(owners, jnp.clip(local, 0, last), axis=1)
        return jnp.where(local >= 0, found, -1)


def written(
    pool: jax.Array,
    new: jax.Array,
    place: jax.Array,
    owners: jax.Array,
    positions: jax.Array,
    pages: Pages,
) -> jax.Array:
    """The pool with the new tokens' values in it.

    Args:
        pool: (layers, P, O, K x H).
        new: (B, T, K, H).
        place: The layer, int32 scalar.
        owners: As `Pages.physical` takes them.
        positions: (B, T), -1 for tokens that are none.
        pages: Where they lie.
    """
    whole = positions // pages.page_size
    here = (positions >= 0) & (whole % pages.num_ranks == pages.rank)
    local = jnp.where(here, whole // pages.num_ranks, -1)
    physical = pages.physical(owners, local)
    outside = pool.shape[1]
    physical = jnp.where(physical >= 0, physical, outside)
    offset = positions % pages.page_size
    flat = new.reshape(*new.shape[:2], -1).astype(pool.dtype)
    return pool.at[place, physical, offset].set(flat, mode="drop")


def paged_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array | None,
    place: jax.Array,
    owners: jax.Array,
    positions: jax.Array,
    *,
    pages: Pages,
    scale: float,
    value_size: int,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Causal attention to everything written at and before each query's position.

    Where pages are split over a mesh axis of n devices: one all-reduce of the maximum
    of each query and head, and one of their sums and results, B x T x N x (H + 1) fp32
    values.

    Args:
        q: (B, T, N, H).
        keys: The pool of keys.
        values: The pool of values; None where they are the first of the keys' dims.
        place: The layer.
        owners: As `Pages.physical` takes them.
        positions: (B, T), -1 for tokens that are none: their results are 0.
        pages: Where keys lie.
        scale: Scores are multiplied by it.
        value_size: Size of a value.
        bias: (distances, N), added to the scores of keys so many places before; the
            last of them for all that are farther.

    Returns:
        (B, T, N, value_size), the dtype of `q`.
    """
    batch, new, heads, head_dim = q.shape
    kv_heads = keys.shape[-1] // head_dim
    q_BTKGH = q.reshape(batch, new, kv_heads, heads // kv_heads, head_dim)
    most = pages.ring or owners.shape[1]
    at_a_time = min(max(1, _TOKENS_AT_A_TIME // pages.page_size), most)
    first = _first_page(positions, pages)
    last = jnp.max(positions, axis=1) // pages.page_size
    mine = (last - pages.rank) // pages.num_ranks  # the last of this device's pages
    trips = jnp.max(-(-(mine - first + 1) // at_a_time), initial=0)
    given = keys, values, place, owners, pages, value_size, bias

    def body(step: jax.Array, found: tuple) -> tuple:
        local = first[:, None] + step * at_a_time + jnp.arange(at_a_time)
        local = jnp.where(local <= mine[:, None], local, -1)
        return _met(q_BTKGH, local, positions, found, given, scale)

    shape = batch, kv_heads, heads // kv_heads, new
    nothing = (
        jnp.full(shape, _UNSEEN, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, value_size), jnp.float32),
    )
    found = lax.fori_loop(0, trips, body, nothing)
    total, mixed = _over_ranks(found, pages)
    mixed_BKGTH = mixed / jnp.where(total == 0, 1, total)[..., None]
    mixed_BTKGH = jnp.transpose(mixed_BKGTH, (0, 3, 1, 2, 4))
    return mixed_BTKGH.reshape(batch, new, heads, value_size).astype(q.dtype)


def _first_page(positions: jax.Array, pages: Pages) -> jax.Array:
    """(B,): the first of this device's pages that a query of an example sees."""
    if pages.window is None:
        return jnp.zeros(positions.shape[0], jnp.int32)
    earliest = jnp.min(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions), 1)
    whole = jnp.maximum(earliest - pages.window + 1, 0) // pages.page_size
    return jnp.maximum(whole - pages.rank + pages.num_ranks - 1, 0) // pages.num_ranks


def _met(
    q_BTKGH: jax.Array,
    local: jax.Array,
    positions: jax.Array,
    found: tuple,
    given: tuple,
    scale: float,
) -> tuple:
    """The online softmax after some more pages."""
    keys, values, place, owners, pages, value_size, bias = given
    physical = jnp.maximum(pages.physical(owners, local), 0)
    kv_heads = q_BTKGH.shape[2]
    k_BSKH = _read(keys, place, physical, kv_heads)
    v_BSKH = k_BSKH[..., :value_size]
    if values is not None:
        v_BSKH = _read(values, place, physical, kv_heads)
    whole = local * pages.num_ranks + pages.rank
    at = whole[..., None] * pages.page_size + jnp.arange(pages.page_size)
    at = jnp.where(local[..., None] >= 0, at, jnp.iinfo(jnp.int32).max)
    ahead = positions[:, :, None] - at.reshape(at.shape[0], 1, -1)
    seen = ahead >= 0
    if pages.window is not None:
        seen &= ahead < pages.window
    # What nobody sees may be anything, a NaN that an earlier owner left too.
    v_BSKH = jnp.where(seen.any(axis=1)[..., None, None], v_BSKH, 0)
    seen = seen[:, None, None]
    scores = jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32
    )
    scores = scores * scale
    if bias is not None:
        scores = scores + _by_distance(bias, ahead, kv_heads)
    scores = jnp.where(seen, scores, _UNSEEN)
    highest, total, mixed = found
    higher = jnp.maximum(highest, jnp.max(scores, axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0)
    shrunk = jnp.exp(highest - higher)
    more = jnp.einsum(
        "BKGTS,BSKH->BKGTH",
        weights.astype(v_BSKH.dtype),
        v_BSKH,
        preferred_element_type=jnp.float32,
    )
    total = total * shrunk + jnp.sum(weights, axis=-1)
    return higher, total, mixed * shrunk[..., None] + more


def _by_distance(bias: jax.Array, ahead: jax.Array, kv_heads: int) -> jax.Array:
    """(distances, N), (B, T, S) -> (B, K, G, T, S)."""
    found = bias.astype(jnp.float32)[jnp.clip(ahead, 0, bias.shape[0] - 1)]
    found_BTSKG = found.reshape(*ahead.shape, kv_heads, -1)
    return jnp.transpose(found_BTSKG, (0, 3, 4, 1, 2))


def _read(
    pool: jax.Array, place: jax.Array, physical: jax.Array, kv_heads: int
) -> jax.Array:
    """-> (B, S, K, H): the pages of one layer, one after another."""
    found = pool[place, physical]
    return found.reshape(found.shape[0], -1, kv_heads, found.shape[-1] // kv_heads)


def _over_ranks(found: tuple, pages: Pages) -> tuple[jax.Array, jax.Array]:
    highest, total, mixed = found
    if pages.num_ranks == 1:
        return total, mixed
    with asked("cache_softmax"):
        highest_of_all = lax.pmax(highest, pages.mesh_axis)
        shrunk = jnp.exp(highest - highest_of_all)
        parts = total * shrunk, mixed * shrunk[..., None]
        return lax.psum(parts, pages.mesh_axis)
