"""The cache of a layer while a program runs: pages of pools that the layers share."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshpar.model.token_cache import array_name, cached_axes, kept_heads
from meshpar.parallel.paged_attention import Pages, paged_attention, written
from meshpar.rules.rules import auto_mesh_shape

_QUERIES = ("batch", "seq", "heads", "head_dim")

Pools = dict[str, Any]
"""Name of a `CachedArray` -> (layers, pages, tokens of a page, heads x size).

Heads and their sizes are one dim, of which TPUs pad no part."""


class Rows(NamedTuple):
    """The examples that a program is given, and where their tokens lie.

    Args:
        tables: (batch, pages of an example) int32, pages of the pool.
        slots: (batch,) int32, the place of each among those that may run at once.
        starts: (batch,) int32, tokens that are there already.
        counts: (batch,) int32, tokens that are new; 0 for an example that rests.
    """

    tables: Any
    slots: Any
    starts: Any
    counts: Any

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
    ) -> jax.Array:
        """As `TokenCache.attend`; writes the new keys and values first."""
        names = [array_name(name, self._asked) for name in ("keys", "values")]
        self._asked += 1
        pages = self._pages(names[0], window)
        owners = self.rows.tables
        if pages.ring is not None:
            owners = (self.rows.slots * pages.ring)[:, None]
        for name, new in zip(names, (k, v), strict=True):
            if new is not None:
                self._write(name, new, owners, pages, scope)
        whole = (None, None)
        heads = kept_heads(k.shape[2], _head_shards(scope))
        pool = (None, None, None, cached_axes(heads)[0])
        given = [self.pools[name] for name in names if name in self.pools]
        size = k.shape[-1] if value_size is None else value_size
        size = size if v is None else v.shape[-1]

        def local(q: jax.Array, place: jax.Array, *of: jax.Array) -> jax.Array:
            owners, positions, keys, *values = of
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
            )

        axes = (_QUERIES, (), whole, whole, *(pool for _ in given))
        mixed = scope.map_shards(local, axes, _QUERIES)(
            scope.constrain(q, _QUERIES), self.place, owners, self.positions, *given
        )
        return scope.constrain(mixed, _QUERIES)

    def _write(
        self, name: str, new: jax.Array, owners: jax.Array, pages: Pages, scope: Any
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
        )(pool, new, self.place, owners, self.positions)

    def _pages(self, name: str, window: int | None) -> Pages:
        return Pages(
            page_size=self.page_size,
            window=window,
            ring=self.rings.get(name),
            num_ranks=self.num_ranks,
        )


def _head_shards(scope: Any) -> int:
    if scope.rules is None:
        return 1
    sizes = auto_mesh_shape()
    return math.prod(sizes.get(axis, 1) for axis in scope.rules.mesh_axes("heads"))
