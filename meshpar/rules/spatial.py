"""The logical axes of space, whose neighbouring places are read together."""

from __future__ import annotations

from collections.abc import Sequence

SPATIAL = ("depth", "height", "width", "pair_rows", "pair_columns")
"""Dims of volumes, the last two of images too; then those of pairs of residues."""


def short_dim(
    parts: Sequence[int], window: Sequence[int], split: Sequence[int]
) -> int | None:
    """Return a split dim with a part shorter than half a window, unless all have one.

    Args:
        parts: Places of one device, along each dim of space.
        window: Places of a convolution's window.
        split: The dims that devices share.

    Example:
        >>> short_dim((1, 4, 8), (3, 3, 3), (0, 1))
        0
        >>> short_dim((1, 1, 8), (3, 3, 3), (0, 1))
    """
    short = [dim for dim in split if parts[dim] <= window[dim] // 2]
    return short[0] if short and len(short) < len(split) else None
