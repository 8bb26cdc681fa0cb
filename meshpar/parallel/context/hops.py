"""Hops: whose keys a device's queries meet, one device's after another's.

At hop h device r has the keys of device r - h. Which tiles of scores it then makes is
known before any data is, so that hops without a pair that sees are left out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.model.token_order import TokenOrder
from meshpar.parallel.context.mask import PADDING, Mask


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
