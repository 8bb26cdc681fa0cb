"""An AFNO of `models` on a periodic grid, beside a plain one."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.models.afno import AFNOConfig, afno
from tests.zoo.entry import Entry, one_group
from tests.zoo.plain import normal

EMBED, HEIGHT, WIDTH, PATCH, CHANNELS = 8, 8, 16, 2, 2
BLOCKS, FFN, MODES, THRESHOLD, STD = 2, 16, 4, 0.01, 0.25
ROWS, COLUMNS = HEIGHT // PATCH, WIDTH // PATCH


class Mixing(nnx.Module):
    """The spectral layer in complex numbers, one block after another."""

    def __init__(self, rngs):
        size = EMBED // BLOCKS
        self.up = normal(rngs, (2, BLOCKS, size, size), std=STD)
        self.up_bias = normal(rngs, (2, BLOCKS, size), std=STD)
        self.down = normal(rngs, (2, BLOCKS, size, size), std=STD)
        self.down_bias = normal(rngs, (2, BLOCKS, size), std=STD)

    def __call__(self, x):
        y = jnp.fft.rfft2(x, axes=(1, 2), norm="ortho")[:, :, :MODES]
        y = self.times(y, self.up[...], self.up_bias[...])
        y = jnp.maximum(y.real, 0) + 1j * jnp.maximum(y.imag, 0)
        y = self.times(y, self.down[...], self.down_bias[...])
        y = shrunk(y.real) + 1j * shrunk(y.imag)
        y = jnp.pad(y, ((0, 0), (0, 0), (0, COLUMNS // 2 + 1 - MODES), (0, 0)))
        return jnp.fft.irfft2(y, s=(ROWS, COLUMNS), axes=(1, 2), norm="ortho")

    def times(self, y, weight, bias):
        parts = jnp.split(y, BLOCKS, axis=-1)
        weight, bias = weight[0] + 1j * weight[1], bias[0] + 1j * bias[1]
        found = [part @ w + b for part, w, b in zip(parts, weight, bias, strict=True)]
        return jnp.concatenate(found, axis=-1)


def shrunk(x):
    return jnp.where(jnp.abs(x) > THRESHOLD, x - THRESHOLD * jnp.sign(x), 0)


class Block(nnx.Module):
    def __init__(self, rngs, layers):
        self.mixing_norm = nnx.LayerNorm(EMBED, epsilon=1e-6, rngs=rngs)
        self.mixing = Mixing(rngs)
        self.mlp_norm = nnx.LayerNorm(EMBED, epsilon=1e-6, rngs=rngs)
        self.up = normal(rngs, (EMBED, FFN), std=STD)
        self.up_bias = nnx.Param(jnp.zeros((FFN,)))
        self.down = normal(rngs, (FFN, EMBED), std=STD / (2 * layers) ** 0.5)
        self.down_bias = nnx.Param(jnp.zeros((EMBED,)))

    def __call__(self, x):
        normed = self.mixing_norm(x)
        x = x + normed + self.mixing(normed)
        hidden = jax.nn.gelu(self.mlp_norm(x) @ self.up[...] + self.up_bias[...])
        return x + hidden @ self.down[...] + self.down_bias[...]


class Ends(nnx.Module):
    def __init__(self, rngs):
        window = (3, 3, CHANNELS, CHANNELS)
        self.read = normal(rngs, window, std=STD)
        pixels = PATCH * PATCH
        self.patch_embed = normal(rngs, (pixels * 2 * CHANNELS, EMBED), std=STD)
        self.patch_bias = nnx.Param(jnp.zeros((EMBED,)))
        self.latitude_embed = normal(rngs, (ROWS, EMBED), std=STD)
        self.final_norm = nnx.LayerNorm(EMBED, epsilon=1e-6, rngs=rngs)
        self.unpatch = normal(rngs, (EMBED, pixels * CHANNELS), std=STD)
        self.write = normal(rngs, window, std=STD)

    def embed(self, batch):
        fields = batch["fields"]
        smooth = jax.nn.gelu(convolved(fields, self.read[...]))
        both = jnp.concatenate([fields, smooth], axis=-1)
        patches = [
            [
                both[:, row : row + PATCH, column : column + PATCH].reshape(8, -1)
                for column in range(0, WIDTH, PATCH)
            ]
            for row in range(0, HEIGHT, PATCH)
        ]
        patches = jnp.stack([jnp.stack(row, axis=1) for row in patches], axis=1)
        x = patches @ self.patch_embed[...] + self.patch_bias[...]
        return x + self.latitude_embed[...][:, None]

    def head(self, x, batch):
        patches = self.final_norm(x) @ self.unpatch[...]
        tiles = patches.reshape(8, ROWS, COLUMNS, PATCH, PATCH, CHANNELS)
        rows = [
            jnp.concatenate([tiles[:, row, column] for column in range(COLUMNS)], 2)
            for row in range(ROWS)
        ]
        fields = jnp.concatenate(rows, axis=1)
        change = fields + convolved(fields, self.write[...])
        error = batch["fields"] + change - batch["targets"]
        return jnp.sum(error**2), jnp.float32(error.size)


def convolved(x, kernel):
    """Place by place: rows beyond the walls are 0, columns go round."""
    x = jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0)))
    return sum(
        jnp.roll(x, 1 - column, axis=2)[:, row : row + HEIGHT] @ kernel[row, column]
        for row in range(3)
        for column in range(3)
    )


def batch():
    rng = np.random.default_rng(2)
    shape = (8, HEIGHT, WIDTH, CHANNELS)
    return {
        name: rng.normal(size=shape).astype(np.float32)
        for name in ("fields", "targets")
    }


def entry(**rules):
    """Under rules of its own."""
    return Entry(
        model=lambda layers: afno(
            AFNOConfig(
                layers=layers,
                embed=EMBED,
                height=HEIGHT,
                width=WIDTH,
                patch=PATCH,
                channels=CHANNELS,
                blocks=BLOCKS,
                ffn=FFN,
                modes=MODES,
                threshold=THRESHOLD,
                init_std=STD,
            )
        ),
        ends=Ends,
        groups=one_group(Block),
        batch=batch,
        rules=rules,
    )


AFNO = entry()
ROWS_SPLIT = entry(height="tensor", mlp=None)
COLUMNS_SPLIT = entry(width="tensor", mlp=None)
BOTH_SPLIT = entry(height="context", width="tensor", mlp=None)
BESIDE_TENSOR = entry(height="context")
"""Rows over one mesh axis, the MLP's hidden values over another."""
