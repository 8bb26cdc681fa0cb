"""Masks: which keys a query sees, and which tiles of scores have any such pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import InputError

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
