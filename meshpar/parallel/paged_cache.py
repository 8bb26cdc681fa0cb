"""The cache of a layer while a program runs: pages of pools that the layers share."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshpar.model.token_cache import (
    SOURCE_KEYS,
    SOURCE_VALUES,
    array_name,
    cached_axes,
    kept_heads,
)
from meshpar.parallel.moves import ruled_degree
from meshpar.parallel.paged_attention import Pages, paged_attention, written

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
        """(batch, source tokens), the place of each; -1 for none."""
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
        """(batch, tokens), the place of each new token in its sequence; -1 for none."""
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
        """As `TokenCache.attend`; writes the new keys and values first."""
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
        """As `TokenCache.attend_to_source`; writes what is given of it first."""
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
        """Attention of queries, at their positions and with their bias, to pools."""
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
        """As `Pages.physical` takes them."""
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
