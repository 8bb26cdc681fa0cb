"""Patches: an image as a row of squares, and back."""

from __future__ import annotations

import math

import jax


def to_patches(images: jax.Array, patch: int) -> jax.Array:
    """(batch, height, width, channels) -> (batch, patches, values), row by row.

    Example:
        >>> import jax.numpy as jnp
        >>> to_patches(jnp.arange(16.0).reshape(1, 4, 4, 1), 2)[0, 1].tolist()
        [2.0, 3.0, 6.0, 7.0]
    """
    batch, height, width, channels = images.shape
    rows, columns = height // patch, width // patch
    cut = images.reshape(batch, rows, patch, columns, patch, channels)
    cut = cut.transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(batch, rows * columns, patch * patch * channels)


def to_images(patches: jax.Array, patch: int) -> jax.Array:
    """Undoes `to_patches` of square images."""
    batch, tokens, values = patches.shape
    columns, channels = math.isqrt(tokens), values // patch**2
    cut = patches.reshape(batch, columns, columns, patch, patch, channels)
    cut = cut.transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(batch, columns * patch, columns * patch, channels)
