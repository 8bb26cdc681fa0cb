"""Mixing of a grid's places by their frequencies: AFNO (Guibas et al. 2022)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar import Scope, fft
from meshpar.models.layers.attention import normal

GRID = ("batch", "height", "width", "embed")
"""Logical axes of the stream: latitudes and longitudes, or rows and columns."""


class SpectralMixing(nnx.Module):
    """`irfft2(shrink(mlp(rfft2(x))))`: one MLP for all frequencies, complex.

    Its two weights are block-diagonal over channels. Of the transform the frequencies
    stay where it leaves them, as the MLP is of each alone, so that a split grid takes
    one all-to-all for each split dim in each direction.

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
        over = GRID[1:3]
        options = {"norm": "ortho", "transposed": True}
        y = fft.rfftn(x, GRID, over, scope, modes=self.modes, **options)
        hidden = _in_blocks(y, self.up[...], self.up_bias[...])
        hidden = jax.lax.complex(jax.nn.relu(hidden.real), jax.nn.relu(hidden.imag))
        y = _in_blocks(hidden, self.down[...], self.down_bias[...])
        y = jax.lax.complex(self._shrunk(y.real), self._shrunk(y.imag))
        back = fft.irfftn(y, GRID, over, scope, size=x.shape[2], **options)
        return back.astype(x.dtype)

    def _shrunk(self, x: jax.Array) -> jax.Array:
        return jnp.sign(x) * jax.nn.relu(jnp.abs(x) - self.threshold)


def _in_blocks(y: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Complex (..., embed) times a block-diagonal weight."""
    wide, shift = (jax.lax.complex(*one.astype(jnp.float32)) for one in (weight, bias))
    cut = y.reshape(*y.shape[:-1], *wide.shape[:2])
    found = jnp.einsum("...bi,bio->...bo", cut, wide) + shift
    return found.reshape(y.shape)
