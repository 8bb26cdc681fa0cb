"""Vision Transformer (Dosovitskiy et al. 2021): patches, learned positions, labels."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar import Input, InputError, Model, Scope, from_nnx
from meshpar.model.inputs import Batch
from meshpar.models.family import Family
from meshpar.models.field_types import (
    check_dropout,
    check_field_types,
    check_heads,
    check_least_zero,
    check_sizes,
)
from meshpar.models.layers.attention import normal
from meshpar.models.layers.layer_norm_block import RESIDUAL, LayerNormBlock
from meshpar.models.layers.mlp import Activation
from meshpar.models.layers.norm import LayerNorm
from meshpar.models.layers.patches import to_patches
from meshpar.parallel.tensor import cross_entropy

_SIZES = ("layers", "embed", "heads", "image", "patch", "channels", "classes")
_POOLINGS = ("class_token", "mean")
_ACTIVATIONS = ("gelu_tanh", "gelu")


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Shape of a Vision Transformer.

    Args:
        layers: Number of blocks.
        embed: Width of the residual stream.
        heads: Attention heads.
        image: Height and width of an image, in pixels.
        patch: Of a patch, which divides them.
        channels: Of a pixel.
        classes: How many labels there are.
        ffn: Hidden size of the MLP; `4 * embed` when 0.
        pooling: What the head reads: `class_token`, one more token than patches, or
            `mean`, of all of them. Under `sequence_parallel` their number divides.
        activation: Of the MLPs: GELU by tanh (`gelu_tanh`), or exact (`gelu`).
        dropout: Share of values dropped after the embedding and each branch.
        norm_epsilon: Added to the variance.
        init_std: Standard deviation of the initial weights.

    Raises:
        InputError: A size that is no whole number or below 1, another value of the
            wrong type, no such pooling, heads that do not divide `embed`, or patches
            that do not divide the image.
    """

    layers: int
    embed: int
    heads: int
    image: int
    patch: int
    classes: int
    channels: int = 3
    ffn: int = 0
    pooling: str = "class_token"
    activation: Activation = "gelu_tanh"
    dropout: float = 0.0
    norm_epsilon: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        check_field_types(self)
        check_sizes(self, *_SIZES)
        check_least_zero(self, ffn="4 * embed")
        check_heads(self.embed, self.heads)
        if self.image % self.patch:
            raise InputError(
                f"image={self.image} is not a multiple of patch={self.patch}; choose "
                "patches that tile the image",
                key="model.patch_indivisible",
            )
        if self.pooling not in _POOLINGS:
            raise InputError(
                f"pooling={self.pooling!r}: must be one of {', '.join(_POOLINGS)}",
                key="model.unknown_pooling",
            )
        if self.activation not in _ACTIVATIONS:
            raise InputError(
                f"activation={self.activation!r}: must be one of "
                f"{', '.join(_ACTIVATIONS)}",
                key="model.unknown_activation",
            )
        check_dropout(self.dropout)

    @property
    def has_class_token(self) -> bool:
        """True if a class token goes through the blocks with the patches."""
        return self.pooling == "class_token"

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return (self.image // self.patch) ** 2 + self.has_class_token

    @property
    def inputs(self) -> dict[str, Input]:
        """Images, their labels and, where they are given, how much each counts."""
        pixels = (None, self.image, self.image, self.channels)
        return {
            "images": Input(("batch", "height", "width", "channels"), shape=pixels),
            "labels": Input(("batch",), "int", below=self.classes),
            "weights": Input(("batch",), optional=True, is_weight=True),
        }


class ViTEnds(nnx.Module):
    """Patch and position embedding, final norm and classifier."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs) -> None:
        embed, std = config.embed, config.init_std
        pixels = config.patch * config.patch * config.channels
        self.patch, self.dropout = config.patch, config.dropout
        self.patch_embed = normal((pixels, embed), std, (None, "embed"), rngs=rngs)
        self.patch_bias = _zeros((embed,), ("embed",))
        self.class_token = (
            normal((embed,), std, ("embed",), rngs=rngs)
            if config.has_class_token
            else None
        )
        self.position_embed = normal(
            (config.tokens, embed), std, (None, "embed"), rngs=rngs
        )
        self.final_norm = LayerNorm(embed, epsilon=config.norm_epsilon, rngs=rngs)
        # Few classes, and one vector an image: every device makes all logits.
        self.classifier = nnx.Param(
            jnp.zeros((config.classes, embed)), out_sharding=(None, "embed")
        )
        self.classifier_bias = _zeros((config.classes,), (None,))

    def embed(self, batch: Batch, scope: Scope) -> jax.Array:
        """Images (batch, height, width, channels) -> (batch, tokens, embed)."""
        table = self.patch_embed[...]
        patches = to_patches(batch["images"].astype(table.dtype), self.patch)
        x = jnp.einsum("BTP,PD->BTD", patches, table) + self.patch_bias[...]
        if self.class_token is not None:
            first = jnp.broadcast_to(self.class_token[...], (len(x), 1, x.shape[-1]))
            x = jnp.concatenate([first, x], axis=1)
        # Indexed, so that GSPMD sums up the gradient where the tokens are split.
        positions = self.position_embed[scope.positions(x.shape[1])]
        x = scope.constrain(x + positions, RESIDUAL)
        return scope.dropout(x, self.dropout, "embed")

    def logits(self, x: jax.Array, scope: Scope) -> jax.Array:
        """(batch, tokens, embed) -> fp32 (batch, classes)."""
        normed = scope.constrain(self.final_norm(x), ("batch", "seq", "embed"))
        wide = normed.astype(jnp.float32)
        pooled = (
            jnp.mean(wide, axis=1) if self.class_token is None else wide[:, 0]
        ).astype(x.dtype)
        logits = jnp.einsum(
            "BD,CD->BC",
            pooled,
            self.classifier[...],
            preferred_element_type=jnp.float32,
        )
        return logits + self.classifier_bias[...].astype(jnp.float32)

    def head(
        self, x: jax.Array, batch: Batch, scope: Scope
    ) -> tuple[jax.Array, jax.Array]:
        """Summed loss and summed weights of the images."""
        labels = batch["labels"]
        weights = batch.get("weights", jnp.ones(labels.shape, jnp.float32))
        return cross_entropy(self.logits(x, scope), labels, weights, scope)


def vit(config: ViTConfig) -> Model:
    """The model of a config, under meshpar's contract."""
    return from_nnx(
        ends=lambda rngs: ViTEnds(config, rngs),
        block=lambda rngs: LayerNormBlock(
            config, rngs, causal=False, activation=config.activation
        ),
        num_layers=config.layers,
        inputs=config.inputs,
    )


def _zeros(shape: tuple[int, ...], logical_axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape), out_sharding=logical_axes)


_IMAGENET = {"image": 224, "patch": 16, "classes": 1000}

VIT = Family(
    config=ViTConfig,
    build=vit,
    presets={
        "tiny-vit": ViTConfig(
            layers=4, embed=128, heads=8, image=32, patch=8, classes=10, pooling="mean"
        ),
        "vit-b16": ViTConfig(layers=12, embed=768, heads=12, **_IMAGENET),
        "vit-l16": ViTConfig(layers=24, embed=1024, heads=16, **_IMAGENET),
    },
    fuzzed=(
        "--preset tiny-vit --model layers=5,embed=48,heads=6,image=16,patch=4",
        "--preset tiny-vit --model layers=3,embed=32,heads=4,image=12,patch=4,"
        "pooling=class_token,dropout=0.1",
    ),
)
"""With the sizes of Dosovitskiy et al. 2021, table 1."""
