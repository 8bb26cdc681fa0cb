"""Mixing of a grid's places by their frequencies: AFNO (Guibas et al. 2022)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar import Scope, fft
from meshpar.models.layers.attention import normal

GRID = ("batch", "height", "width", "embed")
"""Logical axes of the stream: latitudes and longitudes, or rows and columns."""


class SpectralMixing(nnx.Module):
    """`irfft2(shrink(mlp(rfft2(x))))`: one MLP for all frequencies, complex.

    Its two weights are block-diagonal over channels; `meshpar.fft.filtered` says what
    is sent for a grid that devices share.

    Args:
        embed: Channels.
        blocks: Of the weights, which divide the channels.
        modes: Frequencies of the last dim that are kept; all when None.
        threshold: Of the soft shrinkage, which lets frequencies die out.
        init_std: Standard deviation of the initial weights.
    """

    def __init__(
        self,
        embed: int,
        *,
        blocks: int,
        modes: int | None,
        threshold: float,
        init_std: float,
        rngs: nnx.Rngs,
    ) -> None:
        self.modes, self.threshold = modes, threshold
        size = embed // blocks
        # Real and imaginary part first.
        square, line = (2, blocks, size, size), (2, blocks, size)
        self.up = normal(square, init_std, (None,) * 4, rngs=rngs)
        self.up_bias = normal(line, init_std, (None,) * 3, rngs=rngs)
        self.down = normal(square, init_std, (None,) * 4, rngs=rngs)
        self.down_bias = normal(line, init_std, (None,) * 3, rngs=rngs)

    def __call__(self, x: jax.Array, scope: Scope) -> jax.Array:
        """(batch, height, width, embed) -> alike, in fp32 between."""
        names = "up", "up_bias", "down", "down_bias"
        weights = tuple(getattr(self, name)[...] for name in names)
        mix = functools.partial(_mixed, self.threshold)
        options: dict[str, Any] = {"modes": self.modes, "norm": "ortho"}
        y = fft.filtered(x, mix, weights, GRID, GRID[1:3], scope, **options)
        return y.astype(x.dtype)


def _mixed(threshold: float, weights: tuple, y: jax.Array) -> jax.Array:
    """Complex (..., embed), mixed by a block-diagonal MLP of two layers."""
    up, up_bias, down, down_bias = (
        jax.lax.complex(*weight.astype(jnp.float32)) for weight in weights
    )
    hidden = _in_blocks(y, up, up_bias)
    hidden = jax.lax.complex(jax.nn.relu(hidden.real), jax.nn.relu(hidden.imag))
    y = _in_blocks(hidden, down, down_bias)
    return jax.lax.complex(_shrunk(y.real, threshold), _shrunk(y.imag, threshold))


def _in_blocks(y: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    cut = y.reshape(*y.shape[:-1], *weight.shape[:2])
    found = jnp.einsum("...bi,bio->...bo", cut, weight) + bias
    return found.reshape(y.shape)


def _shrunk(x: jax.Array, threshold: float) -> jax.Array:
    return jnp.sign(x) * jax.nn.relu(jnp.abs(x) - threshold)
