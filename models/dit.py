"""Diffusion Transformer (Peebles and Xie 2023): noisy patches to their velocity.

Every block's norms are scaled and shifted, and its branches gated, by time and class.
Unlike there, the model predicts a velocity (`NoisePath`) and no variance, times are
from 0 (clean) to 1 (noise), and initial weights are normal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
from meshpar.models.layers.adaptive_norm import Modulation, adaptive_norm, gated_sum
from meshpar.models.layers.attention import Attention, normal
from meshpar.models.layers.layer_norm_block import RESIDUAL
from meshpar.models.layers.mlp import PlainMLP
from meshpar.models.layers.noise_path import PATHS, NoisePath
from meshpar.models.layers.sinusoids import sinusoids

_SIZES = ("layers", "embed", "heads", "image", "patch", "channels", "classes")
_CONDITION = ("batch", "embed")
_TIME_SCALE = 1000.0
"""Times as the published model counts them, in steps."""
_FREQUENCIES = 256
"""Values of a time's sinusoids (Peebles and Xie 2023, section 3.2)."""

Stream = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Shape of a Diffusion Transformer.

    Args:
        layers: Number of blocks.
        embed: Width of the residual stream; 4 divides it.
        heads: Attention heads.
        image: Height and width of an image, or of the latents of one.
        patch: Of a patch, which divides them.
        channels: Of a pixel, or of a latent.
        classes: How many labels there are; label `classes` is none of them.
        ffn: Hidden size of the MLP; `4 * embed` when 0.
        prediction: Path from clean to noise, `flow` or `v`.
        label_dropout: Share of examples that train without their label, for
            classifier-free guidance (Ho and Salimans 2022).
        norm_epsilon: Added to the variance.
        init_std: Standard deviation of the initial weights.
        modulation_std: Of those of modulations and output; 0 as published.

    Raises:
        InputError: A size that is no whole number or below 1, another value of the
            wrong type, no such prediction, heads that do not divide `embed`, or patches
            that do not divide the image.
    """

    layers: int
    embed: int
    heads: int
    image: int
    patch: int
    classes: int
    channels: int = 4
    ffn: int = 0
    prediction: str = "flow"
    label_dropout: float = 0.1
    norm_epsilon: float = 1e-6
    init_std: float = 0.02
    modulation_std: float = 0.0

    def __post_init__(self) -> None:
        check_field_types(self)
        check_sizes(self, *_SIZES)
        check_least_zero(self, ffn="4 * embed")
        check_heads(self.embed, self.heads)
        check_dropout(self.label_dropout)
        if self.embed % 4:
            raise InputError(
                f"embed={self.embed} is not a multiple of 4: a quarter of it is for "
                "sine and cosine of row and column each",
                key="model.embed_indivisible_by_four",
            )
        if self.image % self.patch:
            raise InputError(
                f"image={self.image} is not a multiple of patch={self.patch}; choose "
                "patches that tile the image",
                key="model.patch_indivisible",
            )
        if self.prediction not in PATHS:
            raise InputError(
                f"prediction={self.prediction!r}: must be one of {', '.join(PATHS)}",
                key="model.unknown_prediction",
            )

    @property
    def path(self) -> NoisePath:
        """From clean to noise."""
        return PATHS[self.prediction]

    @property
    def columns(self) -> int:
        """Patches of a row."""
        return self.image // self.patch

    @property
    def tokens(self) -> int:
        """Patches of an image."""
        return self.columns**2

    @property
    def values(self) -> int:
        """Numbers of a patch."""
        return self.patch * self.patch * self.channels

    @property
    def inputs(self) -> dict[str, Input]:
        """Clean patches and their labels; or patches with noise, and their times.

        `weights` say how much each example counts. With `times` patches are taken as
        they are, and `targets` are what the loss wants predicted.
        """
        patches = ("batch", "seq", None)
        shape = (None, self.tokens, self.values)
        return {
            "patches": Input(patches, shape=shape),
            "labels": Input(("batch",), "int", below=self.classes + 1),
            "weights": Input(("batch",), optional=True, is_weight=True),
            "times": Input(("batch",), optional=True),
            "targets": Input(patches, shape=shape, optional=True),
        }


class DiTBlock(nnx.Module):
    """Attention to all patches and MLP, modulated by the condition (adaLN-zero)."""

    def __init__(self, config: DiTConfig, rngs: nnx.Rngs) -> None:
        embed, std = config.embed, config.init_std
        self.epsilon = config.norm_epsilon
        self.modulation = Modulation(embed, 6, std=config.modulation_std, rngs=rngs)
        self.attention = Attention(
            embed,
            heads=config.heads,
            kv_heads=config.heads,
            head_dim=embed // config.heads,
            init_std=std,
            out_std=std,
            rngs=rngs,
            bias=True,
            out_bias=True,
            causal=False,
        )
        self.mlp = PlainMLP(
            embed, config.ffn or 4 * embed, init_std=std, out_std=std, rngs=rngs
        )

    def __call__(self, stream: Stream, scope: Scope) -> Stream:
        """(batch, tokens, embed) and its condition -> the same."""
        x, condition = stream["x"], stream["condition"]
        vectors = self.modulation(condition, scope)
        shift, scale, gate = vectors[:3]
        normed = adaptive_norm(x, shift, scale, epsilon=self.epsilon)
        normed = scope.save(scope.constrain(normed, RESIDUAL), "attention_normed")
        branch = scope.constrain(self.attention(normed, scope), RESIDUAL)
        x = gated_sum(x, gate, scope.save(branch, "attention_out"))
        shift, scale, gate = vectors[3:]
        normed = adaptive_norm(x, shift, scale, epsilon=self.epsilon)
        normed = scope.save(scope.constrain(normed, RESIDUAL), "mlp_normed")
        branch = scope.constrain(self.mlp(normed, scope), RESIDUAL)
        return {"x": gated_sum(x, gate, branch), "condition": condition}


class DiTEnds(nnx.Module):
    """Noise, embeddings of patches, times and classes, and the output."""

    def __init__(self, config: DiTConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        embed, std = config.embed, config.init_std

        def matrix(rows: int, columns: int, *axes: str | None) -> nnx.Param:
            return normal((rows, columns), std, axes, rngs=rngs)

        self.patch_embed = matrix(config.values, embed, None, "embed")
        self.patch_bias = _zeros((embed,), ("embed",))
        self.time_in = matrix(_FREQUENCIES, embed, None, "mlp")
        self.time_in_bias = _zeros((embed,), ("mlp",))
        self.time_out = matrix(embed, embed, "mlp", "embed")
        self.time_out_bias = _zeros((embed,), ("embed",))
        self.label_embed = matrix(config.classes + 1, embed, None, "embed")
        zero = config.modulation_std
        self.final_modulation = Modulation(embed, 2, std=zero, rngs=rngs)
        self.out = normal((embed, config.values), zero, ("embed", None), rngs=rngs)
        self.out_bias = _zeros((config.values,), (None,))

    def embed(self, batch: Batch, scope: Scope) -> Stream:
        """Patches (batch, tokens, values) -> with noise, embedded, and the condition.

        The condition is (batch, embed), of times and labels.
        """
        patches, times = batch["patches"], batch.get("times")
        if times is None:
            noise, times = _drawn(patches, scope)
            patches = self.config.path.noisy(patches, noise, times[:, None, None])
        table = self.patch_embed[...]
        x = jnp.einsum("BTP,PD->BTD", patches.astype(table.dtype), table)
        x = x + self.patch_bias[...]
        positions = scope.positions(x.shape[1])
        places = _places(positions, self.config.columns, x.shape[-1])
        x = scope.constrain(x + places.astype(x.dtype), RESIDUAL)
        condition = self._time(times) + self._label(batch, scope)
        return {"x": x, "condition": scope.constrain(condition, _CONDITION)}

    def logits(self, stream: Stream, scope: Scope) -> jax.Array:
        """-> fp32 (batch, tokens, values), the predicted velocity."""
        shift, scale = self.final_modulation(stream["condition"], scope)
        epsilon = self.config.norm_epsilon
        normed = adaptive_norm(stream["x"], shift, scale, epsilon=epsilon)
        found = jnp.einsum(
            "BTD,DP->BTP",
            scope.constrain(normed, RESIDUAL),
            self.out[...],
            preferred_element_type=jnp.float32,
        )
        return found + self.out_bias[...].astype(jnp.float32)

    def head(
        self, stream: Stream, batch: Batch, scope: Scope
    ) -> tuple[jax.Array, jax.Array]:
        """Summed squared error of the velocity, and summed weights of its values."""
        error = self.logits(stream, scope) - self._targets(batch, scope)
        weights = batch.get("weights", jnp.ones(len(error), jnp.float32))
        # A 1 for each token at hand: devices that share an example add them up.
        here = (scope.positions(error.shape[1]) >= 0).astype(jnp.float32)
        weights_BT = weights.astype(jnp.float32)[:, None] * here
        loss_sum = jnp.sum(weights_BT[:, :, None] * error**2)
        return loss_sum, jnp.sum(weights_BT) * error.shape[-1]

    def _targets(self, batch: Batch, scope: Scope) -> jax.Array:
        if "times" in batch and "targets" not in batch:
            raise InputError(
                "the batch has 'times', so that its patches are noisy already, but no "
                "'targets' to compare with; give both, or neither",
                key="batch.times_without_targets",
            )
        if "targets" in batch and "times" not in batch:
            raise InputError(
                "the batch has 'targets', but no 'times', so that noise is drawn that "
                "they know nothing of; give both, or neither",
                key="batch.targets_without_times",
            )
        if "targets" in batch:
            return batch["targets"].astype(jnp.float32)
        noise, times = _drawn(batch["patches"], scope)
        return self.config.path.target(batch["patches"], noise, times[:, None, None])

    def _time(self, times: jax.Array) -> jax.Array:
        """(batch,) -> (batch, embed)."""
        waves = sinusoids(_TIME_SCALE * times.astype(jnp.float32), _FREQUENCIES)
        hidden = waves.astype(self.time_in[...].dtype) @ self.time_in[...]
        hidden = jax.nn.silu(hidden + self.time_in_bias[...])
        return hidden @ self.time_out[...] + self.time_out_bias[...]

    def _label(self, batch: Batch, scope: Scope) -> jax.Array:
        """-> (batch, embed); in training a share of the examples is of no class."""
        labels, rate = batch["labels"], self.config.label_dropout
        if scope.training and rate:
            dropped = scope.uniform("label") < rate
            labels = jnp.where(dropped, self.config.classes, labels)
        return self.label_embed[...][labels]


def dit(config: DiTConfig) -> Model:
    """The model of a config, under meshpar's contract."""
    return from_nnx(
        ends=lambda rngs: DiTEnds(config, rngs),
        block=lambda rngs: DiTBlock(config, rngs),
        num_layers=config.layers,
        inputs=config.inputs,
        stream={"x": RESIDUAL, "condition": _CONDITION},
    )


def _drawn(patches: jax.Array, scope: Scope) -> tuple[jax.Array, jax.Array]:
    """Noise of each patch, and time of each example: alike in embedding and head."""
    return scope.normal(patches.shape, "noise"), scope.uniform("time")


def _places(positions: jax.Array, columns: int, embed: int) -> jax.Array:
    """(tokens,) -> (tokens, embed): sinusoids of row and column, half each."""
    rows = sinusoids(positions // columns, embed // 2)
    return jnp.concatenate([rows, sinusoids(positions % columns, embed // 2)], axis=-1)


def _zeros(shape: tuple[int, ...], logical_axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape), out_sharding=logical_axes)


_IMAGENET = {"image": 32, "classes": 1000}


def _sizes(config: DiTConfig) -> dict[str, Any]:
    """Return the sizes of its `Workload`, whose sequences are patches of an image."""
    embed, values = config.embed, config.patch**2 * config.channels
    time = (_FREQUENCIES + 1 + embed + 1) * embed
    last = 2 * embed * (embed + 1)
    biases = embed + values
    return {
        "layers": config.layers,
        "hidden": embed,
        "heads": config.heads,
        "vocab": values,
        "ffn": config.ffn,
        "seq": config.tokens,
        "biases": True,
        "causal": False,
        "modulations": 6,
        # Classes and that of no class, the time's two matrices, the last modulation.
        "other_end_parameters": (config.classes + 1) * embed + time + last + biases,
        "logits_bytes": 0,
    }


DIT = Family(
    config=DiTConfig,
    build=dit,
    sizes=_sizes,
    presets={
        "tiny-dit": DiTConfig(
            layers=4, embed=128, heads=8, image=8, patch=2, channels=1, classes=10
        ),
        "dit-s2": DiTConfig(layers=12, embed=384, heads=6, patch=2, **_IMAGENET),
        "dit-b2": DiTConfig(layers=12, embed=768, heads=12, patch=2, **_IMAGENET),
        "dit-l2": DiTConfig(layers=24, embed=1024, heads=16, patch=2, **_IMAGENET),
        "dit-xl2": DiTConfig(layers=28, embed=1152, heads=16, patch=2, **_IMAGENET),
        # Images of 2048 x 2048, whose latents are an eighth of that.
        "dit-12b": DiTConfig(
            layers=32, embed=4608, heads=36, image=256, patch=2, classes=1000
        ),
    },
    fuzzed=(
        "--preset tiny-dit --model layers=4,embed=32,heads=4,modulation_std=0.1",
        "--preset tiny-dit --model layers=3,embed=48,heads=6,image=12,prediction=v,"
        "modulation_std=0.1",
    ),
)
"""With the sizes of Peebles and Xie 2023, table 1; `dit-12b` is larger than any."""
