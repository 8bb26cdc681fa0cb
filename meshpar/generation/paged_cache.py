"""The paged cache of keys and values, and attention of new tokens to it.

A sequence's keys lie in pages of a few tokens, anywhere in a pool that the layers share
(Kwon et al. 2023, "PagedAttention", section 4). They are read some pages at a time with
the online softmax of Milakov and Gimelshein 2018, for as many tokens as the longest
sequence of the batch has.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked
from meshpar.model.token_cache import (
    SOURCE_KEYS,
    SOURCE_VALUES,
    array_name,
    cached_axes,
    kept_heads,
)
from meshpar.rules.rules import ruled_degree

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
        """Return the pool's page numbers of an example's pages on this device.

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
    """Return the pool with the new tokens' values written.

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
    """Return causal attention to all that is written up to each query's position.

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
    """Return (B,): the first of this device's pages that an example's queries see."""
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
    """Return the online softmax after some more pages."""
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
        by_distance = bias.astype(jnp.float32)[jnp.clip(ahead, 0, bias.shape[0] - 1)]
        bias_BTSKG = by_distance.reshape(*ahead.shape, kv_heads, -1)
        scores = scores + jnp.transpose(bias_BTSKG, (0, 3, 4, 1, 2))
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


def _read(
    pool: jax.Array, place: jax.Array, physical: jax.Array, kv_heads: int
) -> jax.Array:
    """Return (B, S, K, H): the pages of one layer, one after another."""
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


_QUERIES = ("batch", "seq", "heads", "head_dim")

Pools = dict[str, Any]
"""Name of a `CachedArray` -> (layers, pages, tokens of a page, heads x size).

Heads and their sizes are one dim, of which TPUs pad no part."""


class Source(NamedTuple):
    """The texts that a decoder reads, each once.

    Args:
        tokens: (batch, source tokens) int32, read in this program; no columns where
            none is.
        counts: (batch,) int32, how many of a row are.
        lengths: (batch,) int32, tokens of each example's source, read now or before.
    """

    tokens: Any
    counts: Any
    lengths: Any

    @property
    def positions(self) -> jax.Array:
        """Place of each source token, (batch, source tokens); -1 for none."""
        at = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
        return jnp.where(at < self.counts[:, None], at, -1)


class Rows(NamedTuple):
    """The examples that a program is given, and where their tokens lie.

    Args:
        tables: (batch, pages of an example) int32, pages of the pool.
        slots: (batch,) int32, the place of each among those that may run at once.
        starts: (batch,) int32, tokens that are there already.
        counts: (batch,) int32, tokens that are new; 0 for an example that rests.
        source: What they are about, of a model with an encoder.
    """

    tables: Any
    slots: Any
    starts: Any
    counts: Any
    source: Source | None = None

    def positions(self, num_tokens: int) -> jax.Array:
        """Return (batch, tokens): each new token's place in its sequence, or -1."""
        at = jnp.arange(num_tokens, dtype=jnp.int32)
        positions = self.starts[:, None] + at
        return jnp.where(at < self.counts[:, None], positions, -1)


@dataclass
class PagedCache:
    """`TokenCache` of one layer.

    Args:
        pools: Of its group; replaced by what they are after each `attend`.
        place: The layer's place in them, int32 scalar.
        rows: The examples.
        positions: (batch, new tokens), -1 for none.
        max_seq: Tokens that a sequence may have.
        page_size: Tokens of a page.
        rings: Pages that an example uses in turn, by name of what lies in them; the
            others have tables.
        num_ranks: Devices that share the pages of a sequence.
    """

    pools: Pools
    place: jax.Array
    rows: Rows
    positions: jax.Array
    max_seq: int
    page_size: int
    rings: Mapping[str, int] = field(default_factory=dict)
    num_ranks: int = 1
    _asked: int = field(default=0, init=False)
    _asked_of_source: int = field(default=0, init=False)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        scope: Any,
        *,
        window: int | None,
        scale: float,
        value_size: int | None = None,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """Write new keys and values, then attend (`TokenCache.attend`)."""
        names = [array_name(name, self._asked) for name in ("keys", "values")]
        self._asked += 1
        here = self._pages(names[0], window)
        for name, new in zip(names, (k, v), strict=True):
            if new is not None:
                self._write(name, new, self.positions, here, scope)
        heads = kept_heads(k.shape[2], _head_shards(scope))
        size = k.shape[-1] if value_size is None else value_size
        size = size if v is None else v.shape[-1]
        kept = [name for name in names if name in self.pools]
        asked = q, self.positions, bias
        return self._met(asked, kept, here, scope, heads=heads, scale=scale, size=size)

    def attend_to_source(
        self, q: jax.Array, k: jax.Array, v: jax.Array, scope: Any, *, scale: float
    ) -> jax.Array:
        """Write what is given of the source, then attend to all of it."""
        given = {SOURCE_KEYS: k, SOURCE_VALUES: v}
        names = [array_name(name, self._asked_of_source) for name in given]
        self._asked_of_source += 1
        here, source = self._pages(names[0], None), self.rows.source
        assert source is not None  # It is made wherever a plan has room for one.
        for name, new in zip(names, given.values(), strict=True):
            if new.shape[1]:
                self._write(name, new, source.positions, here, scope)
        # Every token is as far as the source's last one, and so sees all of it.
        last = jnp.where(self.positions >= 0, source.lengths[:, None] - 1, -1)
        heads, size = kept_heads(k.shape[2], _head_shards(scope)), v.shape[-1]
        asked = q, last, None
        return self._met(asked, names, here, scope, heads=heads, scale=scale, size=size)

    def _met(
        self,
        asked: tuple[jax.Array, jax.Array, jax.Array | None],
        names: list[str],
        pages: Pages,
        scope: Any,
        *,
        heads: int,
        scale: float,
        size: int,
    ) -> jax.Array:
        """Return attention of (queries, positions, bias) to the named pools."""
        q, positions, bias = asked
        whole, more = (None, None), () if bias is None else (bias,)
        pool = (None, None, None, cached_axes(heads)[0])
        given = [self.pools[name] for name in names]

        def local(q: jax.Array, place: jax.Array, *of: jax.Array) -> jax.Array:
            owners, positions, *pools = of
            keys, *values = pools[: len(given)]
            return paged_attention(
                q,
                keys,
                values[0] if values else None,
                place,
                owners,
                positions,
                pages=pages,
                scale=scale,
                value_size=size,
                bias=pools[-1] if more else None,
            )

        axes = (_QUERIES, (), whole, whole, *(pool for _ in given))
        axes += tuple((None, "heads") for _ in more)
        owners = self._owners(pages)
        mixed = scope.map_shards(local, axes, _QUERIES)(
            scope.constrain(q, _QUERIES), self.place, owners, positions, *given, *more
        )
        return scope.constrain(mixed, _QUERIES)

    def _owners(self, pages: Pages) -> jax.Array:
        """Return the owners of pages that `Pages.physical` takes."""
        if pages.ring is None:
            return self.rows.tables
        return (self.rows.slots * pages.ring)[:, None]

    def _write(
        self, name: str, new: jax.Array, positions: jax.Array, pages: Pages, scope: Any
    ) -> None:
        pool = self.pools[name]
        copies = kept_heads(new.shape[2], _head_shards(scope)) // new.shape[2]
        new = jnp.repeat(new, copies, axis=2) if copies > 1 else new
        of_token = cached_axes(new.shape[2])
        axes = (None, None, None, of_token[0]), (None, None, *of_token)
        whole = (None, None)
        new = scope.constrain(new, axes[1])
        self.pools[name] = scope.map_shards(
            functools.partial(written, pages=pages), (*axes, (), whole, whole), axes[0]
        )(pool, new, self.place, self._owners(pages), positions)

    def _pages(self, name: str, window: int | None) -> Pages:
        return Pages(
            page_size=self.page_size,
            window=window,
            ring=self.rings.get(name),
            num_ranks=self.num_ranks,
        )


def _head_shards(scope: Any) -> int:
    return 1 if scope.rules is None else ruled_degree(scope.rules, "heads")
