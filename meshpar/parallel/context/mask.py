"""Masks, and hops: which keys a query sees, and where they meet.

At hop h device r has the keys of device r - h. Which tiles of scores it then makes is
known before any data is, so that hops without a pair that sees are left out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import InputError
from meshpar.hardware.platforms import Platform
from meshpar.model.token_order import TokenOrder

PADDING = -1
"""The position of no token: no query sees it."""


@dataclass(frozen=True, kw_only=True)
class Mask:
    """The part of a mask that is known before any data is.

    Args:
        causal: True if a query sees no key that follows it.
        window: A query sees keys less than so many positions away; None for no limit.
        prefix: True if each example begins with tokens that all its queries see.

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
        """Return (query tile, key tile) of tiles with a pair that may see: (pairs, 2).

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
    """Positions of tokens, and the documents that they belong to.

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
    """Return (batch or 1, queries, keys): True if a query of a tile sees a key.

    `prefix` is (batch,), the tokens that each example begins with if `mask.prefix`.
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


def blockwise(
    q: jax.Array, k: jax.Array, mask: Mask, platform: Platform, *, masked: bool
) -> bool:
    """Return True if attention to whole sequences runs in tiles, which keep no scores.

    For long sequences, and under masks that the forms for short ones do not have.

    Args:
        q: (batch, tokens, heads, head_dim).
        k: (batch, keys, kv_heads, head_dim).
        mask: Which keys a query sees by their places.
        platform: Kind of device.
        masked: True if documents separate them.
    """
    long = max(q.shape[1], k.shape[1]) > platform.longest_scores
    return masked or mask.window is not None or long


def _bounds(tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and greatest position of each tile; -1 for padding alone."""
    far = np.iinfo(np.int32).max
    least = np.where(tiles == PADDING, far, tiles).min(axis=1)
    return least, tiles.max(axis=1)


@dataclass(frozen=True, kw_only=True)
class Hops:
    """The work of all devices, for one shape of sequence and mask.

    Args:
        mask: The mask.
        order: Order of the tokens; None if a device has all.
        queries, keys: Tokens of a device.
        tiles: Queries and keys of a tile.
    """

    mask: Mask
    order: TokenOrder | None
    queries: int
    keys: int
    tiles: tuple[int, int]

    def positions(self, rank: Any, *, of_keys: bool) -> Any:
        """Return (tiles, tokens of one): positions of a device's tokens, or `PADDING`.

        Args:
            rank: The device; NumPy's result for an int, JAX's for an array.
            of_keys: True for its keys, else for its queries.
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
        """True if all hops are needed, each passing on the keys of the last one."""
        return self.needed == tuple(range(self.num_ranks)) and self.num_ranks > 2

    def pairs(self, hops: tuple[int, ...], rank: jax.Array) -> jax.Array:
        """Return a device's pairs of tiles, 1 if they count: (hops, pairs, 3).

        As many for each hop and device; 0 fills up.

        Args:
            hops: Some of `needed`.
            rank: The device.
        """
        lists, index = _variants(self, hops)
        return jnp.asarray(lists)[jnp.asarray(index)[:, rank]]

    def live(self, hop: int, rank: int) -> np.ndarray:
        """Return the tiles that a device needs at a hop, (pairs, 2)."""
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
    """Return the different lists of pairs, and the index of each (hop, rank)'s."""
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
