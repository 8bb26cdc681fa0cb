"""Forecasts on a latitude-longitude grid by spectral mixing: a small FourCastNet.

Reference: Pathak et al. 2022 (FourCastNet), section 2; Guibas et al. 2022 (AFNO). Here
the grid closes in itself along longitude for its convolutions too, the state's change
is predicted instead of the state, and only latitudes have an embedding: what tells
longitudes apart, such as land, is a field like others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar import Input, InputError, Model, Scope, from_nnx
from meshpar.model.inputs import Batch
from meshpar.models.family import Family
from meshpar.models.field_types import check_field_types, check_least_zero, check_sizes
from meshpar.models.layers.attention import depth_scaled_std, normal
from meshpar.models.layers.norm import LayerNorm
from meshpar.models.layers.spectral import GRID, SpectralMixing
from meshpar.parallel.grids.convolution import grid_convolution

_SIZES = ("layers", "embed", "height", "width", "patch", "channels", "blocks", "window")
_FIELDS = ("batch", "height", "width", None)
_HIDDEN = ("batch", "height", "width", "mlp")
_PERIODIC = ("width",)


@dataclass(frozen=True, kw_only=True)
class AFNOConfig:
    """Shape of a forecasting model.

    Args:
        layers: Number of blocks.
        embed: Width of the residual stream.
        height: Latitudes, between two walls or poles.
        width: Longitudes, which close in themselves.
        patch: Height and width of a patch, which divides both.
        channels: Fields of the state, such as two winds and a height.
        blocks: Of the spectral weights, which divide `embed`.
        ffn: Hidden size of the MLP; `4 * embed` when 0.
        modes: Frequencies along longitude that are kept; all when 0. Where `width` is
            split they divide over its devices.
        window: Of the convolutions of the fields, odd.
        threshold: Of the soft shrinkage of frequencies.
        norm_epsilon: Added to the variance.
        init_std: Standard deviation of the initial weights.

    Raises:
        InputError: A size that is no whole number or below 1, another value of the
            wrong type, patches or blocks that do not divide, an even window, or more
            modes than there are.
    """

    layers: int
    embed: int
    height: int
    width: int
    patch: int
    channels: int = 3
    blocks: int = 4
    ffn: int = 0
    modes: int = 0
    window: int = 3
    threshold: float = 0.01
    norm_epsilon: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        check_field_types(self)
        check_sizes(self, *_SIZES)
        check_least_zero(
            self, ffn="4 * embed", modes="all", threshold="no shrinkage at all"
        )
        for name in ("height", "width"):
            if getattr(self, name) % self.patch:
                raise InputError(
                    f"{name}={getattr(self, name)} is not a multiple of "
                    f"patch={self.patch}; choose patches that tile the grid",
                    key="model.patch_indivisible",
                )
        if self.embed % self.blocks:
            raise InputError(
                f"embed={self.embed} is not a multiple of blocks={self.blocks}",
                key="model.blocks_indivisible",
            )
        if self.window % 2 == 0:
            raise InputError(
                f"window={self.window}: must be odd, to have a middle",
                key="model.even_window",
            )
        there = self.grid[1] // 2 + 1
        if self.modes > there:
            raise InputError(
                f"modes={self.modes}: {self.grid[1]} patches along longitude have "
                f"{there} frequencies; choose fewer, or 0 for all",
                key="model.too_many_modes",
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Patches along latitude and longitude."""
        return self.height // self.patch, self.width // self.patch

    @property
    def inputs(self) -> dict[str, Input]:
        """A state and a later one, in fields of mean 0 and spread 1."""
        fields = (None, self.height, self.width, self.channels)
        return {
            "fields": Input(_FIELDS, shape=fields),
            "targets": Input(_FIELDS, shape=fields),
        }


class AFNOBlock(nnx.Module):
    """Spectral mixing and an MLP, each after a norm and added to the stream."""

    def __init__(self, config: AFNOConfig, rngs: nnx.Rngs) -> None:
        embed, std = config.embed, config.init_std
        hidden = config.ffn or 4 * embed
        norm = functools.partial(LayerNorm, epsilon=config.norm_epsilon, rngs=rngs)
        self.mixing_norm = norm(embed)
        self.mixing = SpectralMixing(
            embed,
            blocks=config.blocks,
            modes=config.modes or None,
            threshold=config.threshold,
            init_std=std,
            rngs=rngs,
        )
        self.mlp_norm = norm(embed)
        out_std = depth_scaled_std(std, config.layers)
        self.up = normal((embed, hidden), std, ("embed", "mlp"), rngs=rngs)
        self.up_bias = _zeros((hidden,), ("mlp",))
        self.down = normal((hidden, embed), out_std, ("mlp", "embed"), rngs=rngs)
        self.down_bias = _zeros((embed,), ("embed",))

    def __call__(self, x: jax.Array, scope: Scope) -> jax.Array:
        """(batch, height, width, embed) -> (batch, height, width, embed)."""
        normed = scope.constrain(self.mixing_norm(x), GRID)
        # As in the paper the mixing has a skip of its own, of what it mixes.
        x = x + scope.constrain(self.mixing(normed, scope), GRID) + normed
        hidden = jnp.einsum("BHWD,DF->BHWF", self.mlp_norm(x), self.up[...])
        hidden = jax.nn.gelu(scope.constrain(hidden + self.up_bias[...], _HIDDEN))
        hidden = scope.save(scope.constrain(hidden, _HIDDEN), "mlp_hidden")
        branch = jnp.einsum("BHWF,FD->BHWD", hidden, self.down[...])
        return x + scope.constrain(branch + self.down_bias[...], GRID)


class AFNOEnds(nnx.Module):
    """Convolution, patches and latitudes; and back to fields, as a change of theirs."""

    def __init__(self, config: AFNOConfig, rngs: nnx.Rngs) -> None:
        embed, channels, std = config.embed, config.channels, config.init_std
        self.patch, pixels = config.patch, config.patch**2
        window = (config.window, config.window)
        self.read = normal((*window, channels, channels), std, (None,) * 4, rngs=rngs)
        self.patch_embed = normal(
            (pixels * 2 * channels, embed), std, (None, "embed"), rngs=rngs
        )
        self.patch_bias = _zeros((embed,), ("embed",))
        self.latitude_embed = normal(
            (config.grid[0], embed), std, (None, "embed"), rngs=rngs
        )
        self.final_norm = LayerNorm(embed, epsilon=config.norm_epsilon, rngs=rngs)
        self.unpatch = normal(
            (embed, pixels * channels), std, ("embed", None), rngs=rngs
        )
        self.write = normal((*window, channels, channels), std, (None,) * 4, rngs=rngs)

    def embed(self, batch: Batch, scope: Scope) -> jax.Array:
        """Fields (batch, height, width, channels) -> (batch, rows, columns, embed)."""
        dtype = self.patch_embed[...].dtype
        fields = scope.constrain(batch["fields"].astype(dtype), _FIELDS)
        smooth = grid_convolution(fields, self.read[...], _FIELDS, _PERIODIC, scope)
        both = jnp.concatenate([fields, jax.nn.gelu(smooth)], axis=-1)
        patches = scope.constrain(_patches(both, self.patch), _FIELDS)
        x = jnp.einsum("BHWP,PD->BHWD", patches, self.patch_embed[...])
        # A matmul, whose gradient GSPMD sums up where the latitudes are split.
        rows = jnp.eye(x.shape[1], dtype=x.dtype)
        rows = scope.constrain(rows, ("height", None))
        latitudes = jnp.einsum("HR,RD->HD", rows, self.latitude_embed[...])
        return scope.constrain(x + self.patch_bias[...] + latitudes[:, None], GRID)

    def logits(self, x: jax.Array, scope: Scope) -> jax.Array:
        """The predicted change, fp32 (batch, height, width, channels)."""
        normed = scope.constrain(self.final_norm(x), GRID)
        patches = jnp.einsum("BHWD,DP->BHWP", normed, self.unpatch[...])
        fields = scope.constrain(_unpatched(patches, self.patch), _FIELDS)
        smooth = grid_convolution(fields, self.write[...], _FIELDS, _PERIODIC, scope)
        return (fields + smooth).astype(jnp.float32)

    def head(
        self, x: jax.Array, batch: Batch, scope: Scope
    ) -> tuple[jax.Array, jax.Array]:
        """Summed squared error and number of values."""
        change = batch["targets"] - batch["fields"]
        error = self.logits(x, scope) - scope.constrain(change, _FIELDS)
        return jnp.sum(error * error), jnp.float32(error.size)


def afno(config: AFNOConfig) -> Model:
    """The model of a config, under meshpar's contract."""
    return from_nnx(
        ends=lambda rngs: AFNOEnds(config, rngs),
        block=lambda rngs: AFNOBlock(config, rngs),
        num_layers=config.layers,
        inputs=config.inputs,
        stream=GRID,
    )


def _patches(fields_BHWC: jax.Array, patch: int) -> jax.Array:
    """-> (batch, rows, columns, places and channels of a patch)."""
    batch, height, width, channels = fields_BHWC.shape
    cut = fields_BHWC.reshape(
        batch, height // patch, patch, width // patch, patch, channels
    )
    cut = cut.transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(*cut.shape[:3], -1)


def _unpatched(patches_BHWP: jax.Array, patch: int) -> jax.Array:
    """Undoes `_patches`."""
    batch, rows, columns, _ = patches_BHWP.shape
    cut = patches_BHWP.reshape(batch, rows, columns, patch, patch, -1)
    cut = cut.transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(batch, rows * patch, columns * patch, -1)


def _zeros(shape: tuple[int, ...], logical_axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape), out_sharding=logical_axes)


AFNO = Family(
    config=AFNOConfig,
    build=afno,
    presets={
        "tiny-afno": AFNOConfig(layers=4, embed=64, height=32, width=64, patch=4),
        # Pathak et al. 2022, section 2.1 and appendix: ERA5 at a quarter of a degree.
        "afno-quarter-degree": AFNOConfig(
            layers=12,
            embed=768,
            height=720,
            width=1440,
            patch=8,
            channels=20,
            blocks=8,
        ),
    },
    fuzzed=(
        "--preset tiny-afno --model layers=5,embed=12,height=6,width=10,patch=2,"
        "channels=2,blocks=3,init_std=0.25",
        "--preset tiny-afno --model layers=2,embed=8,height=16,width=16,patch=2,"
        "blocks=2,modes=4,ffn=16,init_std=0.25 --with-rules height=context",
        "--preset tiny-afno --model layers=2,embed=8,height=8,width=16,patch=2,"
        "blocks=2,modes=4,ffn=16,init_std=0.25 "
        "--with-rules height=context,width=tensor,mlp=none",
    ),
)
"""The second with the sizes of FourCastNet."""
