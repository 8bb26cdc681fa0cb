"""Masks: which keys a query sees, and which tiles of scores have any such pair."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import InputError
from meshpar.model.token_order import TokenOrder

PADDING = -1
"""The position of no token: no query sees it."""


@dataclass(frozen=True, kw_only=True)
class Mask:
    """What is known of a mask before any data is.

    Args:
        causal: Whether a query sees no key that follows it.
        window: A query sees keys less than so many positions away; None for no limit.
        prefix: Whether each example begins with tokens that all its queries see.

    Raises:
        InputError: A window below 1.
    """

    causal: bool = True
    window: int | None = None
    prefix: bool = False

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise InputError(
                f"window={self.window}: must be at least 1, a query's own position, "
                "or None for no limit",
                key="attention.window_too_small",
            )

    def live_tiles(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """(query tile, key tile) of every tile with a pair that may see, (pairs, 2).

        Args:
            queries: Positions, (tiles, tokens of one).
            keys: As `queries`.
        """
        (q_min, q_max), (k_min, k_max) = _bounds(queries), _bounds(keys)
        live = (k_max >= 0) & (q_max >= 0)[:, None]
        if self.causal and not self.prefix:
            live &= q_max[:, None] >= k_min
        if self.window is not None and not self.prefix:
            live &= q_min[:, None] - k_max < self.window
            live &= k_min - q_max[:, None] < self.window
        return np.argwhere(live)


class Marks(NamedTuple):
    """What tells tokens apart: their place, and the document that they are of.

    Args:
        positions: (tokens,), `PADDING` where there is no token.
        segments: (batch, tokens) int32, or None where all are one document. Tokens of
            a number below 0 see none and are seen by none.
    """

    positions: jax.Array
    segments: jax.Array | None


def seen(
    mask: Mask, queries: Marks, keys: Marks, prefix: jax.Array | None
) -> jax.Array:
    """(batch or 1, queries, keys): whether a query sees a key.

    Args:
        mask: What holds for all.
        queries: Of a tile.
        keys: Of a tile.
        prefix: (batch,) tokens that each example begins with, where `mask.prefix`.
    """
    q, k = queries.positions[:, None], keys.positions[None]
    found = jnp.broadcast_to(k >= 0, (q.shape[0], k.shape[1]))
    if mask.causal:
        found &= q >= k
    if mask.window is not None:
        found &= jnp.abs(q - k) < mask.window
    found = found[None]
    if prefix is not None:
        found |= (k >= 0)[None] & (k[None] < prefix[:, None, None])
    if queries.segments is not None and keys.segments is not None:
        of_q, of_k = queries.segments[:, :, None], keys.segments[:, None]
        found &= (of_q == of_k) & (of_k >= 0)
    return found


def _bounds(tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least and greatest position of each tile; -1 for one of padding alone."""
    far = np.iinfo(np.int32).max
    least = np.where(tiles == PADDING, far, tiles).min(axis=1)
    return least, tiles.max(axis=1)


@dataclass(frozen=True, kw_only=True)
class Hops:
    """The work of all devices, for one shape of sequence and mask.

    Args:
        mask: What is known of it.
        order: Of the tokens; None where a device has all.
        queries, keys: Tokens of a device.
        tiles: Queries and keys of a tile.
    """

    mask: Mask
    order: TokenOrder | None
    queries: int
    keys: int
    tiles: tuple[int, int]

    def positions(self, rank: Any, *, of_keys: bool) -> Any:
        """(tiles, tokens of one): where the tokens of a device stand, or `PADDING`.

        Args:
            rank: The device; NumPy's result for an int, JAX's for an array.
            of_keys: Of its keys, else of its queries.
        """
        tokens = self.keys if of_keys else self.queries
        tile = self.tiles[1 if of_keys else 0]
        xp = np if isinstance(rank, int) else jnp
        if self.order is None:
            found, length = xp.arange(tokens, dtype=xp.int32), tokens
        else:
            found, length = (
                self.order.positions(tokens, rank),
                self.order.length(tokens),
            )
        found = xp.where(found < length, found, PADDING)
        padded = xp.pad(found, (0, -tokens % tile), constant_values=PADDING)
        return padded.reshape(-1, tile)

    @property
    def num_ranks(self) -> int:
        """Devices that share the sequence."""
        return 1 if self.order is None else self.order.num_ranks

    @functools.cached_property
    def needed(self) -> tuple[int, ...]:
        """The hops at which some device makes scores, in order."""
        return tuple(hop for hop in range(self.num_ranks) if self._most(hop))

    @property
    def is_ring(self) -> bool:
        """Whether all are needed, so that each passes on what the last one brought."""
        return self.needed == tuple(range(self.num_ranks)) and self.num_ranks > 2

    def pairs(self, hops: tuple[int, ...], rank: jax.Array) -> jax.Array:
        """(hops, pairs, 3) of a device: tiles of queries and keys, 1 if they count.

        As many for each hop and device; 0 fills up.

        Args:
            hops: Some of `needed`.
            rank: The device.
        """
        lists, index = _variants(self, hops)
        return jnp.asarray(lists)[jnp.asarray(index)[:, rank]]

    def live(self, hop: int, rank: int) -> np.ndarray:
        """The tiles that a device needs at a hop, (pairs, 2)."""
        source = (rank - hop) % self.num_ranks
        return _live(self, rank, source)

    def _most(self, hop: int) -> int:
        return max(len(self.live(hop, rank)) for rank in range(self.num_ranks))


@functools.lru_cache(maxsize=4096)
def _live(hops: Hops, rank: int, source: int) -> np.ndarray:
    queries = hops.positions(rank, of_keys=False)
    return hops.mask.live_tiles(queries, hops.positions(source, of_keys=True))


@functools.lru_cache(maxsize=64)
def _variants(hops: Hops, chosen: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The different lists of pairs, and which of them a (hop, rank) has."""
    most = max(hops._most(hop) for hop in chosen)
    lists: dict[bytes, int] = {}
    arrays: list[np.ndarray] = []
    index = np.zeros((len(chosen), hops.num_ranks), np.int32)
    for row, hop in enumerate(chosen):
        for rank in range(hops.num_ranks):
            live = hops.live(hop, rank)
            table = np.zeros((most, 3), np.int32)
            table[: len(live), :2], table[: len(live), 2] = live, 1
            at = lists.setdefault(table.tobytes(), len(arrays))
            if at == len(arrays):
                arrays.append(table)
            index[row, rank] = at
    return np.stack(arrays), index
