"""A pair representation refined by triangles: the pair half of AlphaFold 2's Evoformer.

Tokens of a sequence of residues become a vector for every two of them; blocks of
triangle products, triangle attention and a transition refine it; the head reads from
each the bin of the two residues' distance (a distogram). Pairs are shared by devices
along rows, columns or both, so that a device's memory goes with N^2 / P.

Layers and their order are those of there; what is another:

    inputs     residues alone: no alignment (and so no outer product mean), templates or
               recycling; no biases where they become pairs
    biases     of projections to gates, sides and hidden values; there also of those
               that end a branch
    dropout    none; there 0.25 of rows or columns on the four triangle branches
    first      normal, smaller with the depth where a branch ends; there fan-in scaled,
    values     and 0 where a branch ends and in gates' weights
    head       reads a norm of z_ij; there z_ij + z_ji, without a norm

Reference: Jumper et al. 2021, supplement, algorithms 3, 4, 6 and 11 to 15, sections
1.9.8 and 1.11.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar import Input, Model, Scope, from_nnx
from meshpar.model.inputs import Batch
from meshpar.models.family import Family
from meshpar.models.field_types import check_field_types, check_least_zero, check_sizes
from meshpar.models.layers.attention import depth_scaled_std, normal
from meshpar.models.layers.norm import LayerNorm
from meshpar.models.layers.triangles import (
    PAIR_STREAM,
    Transition,
    TriangleAttention,
    TriangleProduct,
)
from meshpar.parallel.tensor import cross_entropy

_SIZES = (
    *("layers", "embed", "heads", "head_dim", "channels", "residues", "vocab"),
    *("bins", "reach"),
)
_PAIR = ("batch", "pair_rows", "pair_columns")


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """Shape of a model of pairs.

    Args:
        layers: Number of blocks.
        embed: Width of a pair's vector.
        residues: Of a sequence; rows and columns of its pairs.
        heads: Of triangle attention.
        head_dim: Size of a head.
        channels: Of triangle products, which the devices that share the pairs divide.
        ffn: Hidden size of the transition; `4 * embed` when 0.
        vocab: Kinds of residues.
        bins: Of a distance.
        reach: Distances along the sequence beyond this are one.
        norm_epsilon: Added to the variance.
        init_std: Standard deviation of the initial weights.

    Raises:
        InputError: A size that is no whole number or below 1, or another value of the
            wrong type.
    """

    layers: int
    embed: int
    residues: int
    heads: int = 4
    head_dim: int = 32
    channels: int = 128
    ffn: int = 0
    vocab: int = 21
    bins: int = 64
    reach: int = 32
    norm_epsilon: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        check_field_types(self)
        check_sizes(self, *_SIZES)
        check_least_zero(self, ffn="4 * embed")

    @property
    def inputs(self) -> dict[str, Input]:
        """Residues, the bin of each pair's distance and how much each pair counts."""
        pairs = (None, self.residues, self.residues)
        return {
            "tokens": Input(("batch", None), "int", shape=pairs[:2], below=self.vocab),
            "distances": Input(_PAIR, "int", shape=pairs, below=self.bins),
            "weights": Input(_PAIR, shape=pairs, optional=True, is_weight=True),
        }


class PairBlock(nnx.Module):
    """Two triangle products, two attentions, a transition, each added to the pairs."""

    def __init__(self, config: PairConfig, rngs: nnx.Rngs) -> None:
        embed = config.embed
        options: dict[str, Any] = {
            "epsilon": config.norm_epsilon,
            "init_std": config.init_std,
            "out_std": depth_scaled_std(config.init_std, config.layers),
            "rngs": rngs,
        }
        heads: dict[str, Any] = {"heads": config.heads, "head_dim": config.head_dim}
        channels = config.channels
        self.outgoing = TriangleProduct(embed, channels, outgoing=True, **options)
        self.incoming = TriangleProduct(embed, channels, outgoing=False, **options)
        self.starting = TriangleAttention(embed, line="row", **heads, **options)
        self.ending = TriangleAttention(embed, line="column", **heads, **options)
        self.transition = Transition(embed, config.ffn or 4 * embed, **options)

    def __call__(self, z: jax.Array, scope: Scope) -> jax.Array:
        """(batch, rows, columns, embed) -> (batch, rows, columns, embed)."""
        for name in ("outgoing", "incoming", "starting", "ending", "transition"):
            branch = scope.constrain(getattr(self, name)(z, scope), PAIR_STREAM)
            z = scope.constrain(z + scope.save(branch, f"{name}_out"), PAIR_STREAM)
        return z


class PairEnds(nnx.Module):
    """Residues and their distance along the sequence; and a distogram."""

    def __init__(self, config: PairConfig, rngs: nnx.Rngs) -> None:
        embed, std = config.embed, config.init_std
        self.reach, self.vocab = config.reach, config.vocab
        table = (config.vocab, embed)
        self.left = normal(table, std, (None, "embed"), rngs=rngs)
        self.right = normal(table, std, (None, "embed"), rngs=rngs)
        self.offsets = normal(
            (2 * config.reach + 1, embed), std, (None, "embed"), rngs=rngs
        )
        self.final_norm = LayerNorm(embed, epsilon=config.norm_epsilon, rngs=rngs)
        self.distogram = normal((embed, config.bins), std, ("embed", None), rngs=rngs)
        self.distogram_bias = nnx.Param(jnp.zeros((config.bins,)), out_sharding=(None,))

    def embed(self, batch: Batch, scope: Scope) -> jax.Array:
        """Tokens (batch, residues) -> (batch, rows, columns, embed)."""
        # Matmuls, as GSPMD splits no gather by indices that lie split.
        residues = jax.nn.one_hot(batch["tokens"], self.vocab, dtype=jnp.float32)
        residues = scope.constrain(residues, ("batch", None, None))
        rows = scope.constrain(residues, ("batch", "pair_rows", None))
        columns = scope.constrain(residues, ("batch", "pair_columns", None))
        left = jnp.einsum("BIV,VD->BID", rows, self.left[...])
        right = jnp.einsum("BJV,VD->BJD", columns, self.right[...])
        square = 2 * residues.shape[1:2]
        apart = jax.lax.broadcasted_iota(jnp.int32, square, 0)
        apart -= jax.lax.broadcasted_iota(jnp.int32, square, 1)
        bins = jnp.clip(apart, -self.reach, self.reach) + self.reach
        known = jax.nn.one_hot(bins, 2 * self.reach + 1, dtype=jnp.float32)
        known = scope.constrain(known, ("pair_rows", "pair_columns", None))
        offsets = jnp.einsum("IJR,RD->IJD", known, self.offsets[...])
        z = left[:, :, None] + right[:, None] + offsets
        return scope.constrain(z.astype(self.left[...].dtype), PAIR_STREAM)

    def logits(self, z: jax.Array, scope: Scope) -> jax.Array:
        """fp32 (batch, rows, columns, bins)."""
        normed = scope.constrain(self.final_norm(z), PAIR_STREAM)
        logits = jnp.einsum(
            "BIJD,DK->BIJK",
            normed,
            self.distogram[...],
            preferred_element_type=jnp.float32,
        )
        logits = logits + self.distogram_bias[...].astype(jnp.float32)
        return scope.constrain(logits, (*_PAIR, None))

    def head(
        self, z: jax.Array, batch: Batch, scope: Scope
    ) -> tuple[jax.Array, jax.Array]:
        """Summed cross-entropy and summed weights of the pairs."""
        distances = scope.constrain(batch["distances"], _PAIR)
        weights = batch.get("weights", jnp.ones(distances.shape, jnp.float32))
        weights = scope.constrain(weights, _PAIR)
        return cross_entropy(self.logits(z, scope), distances, weights, scope)


def pair(config: PairConfig) -> Model:
    """The model of a config, under meshpar's contract."""
    return from_nnx(
        ends=lambda rngs: PairEnds(config, rngs),
        block=lambda rngs: PairBlock(config, rngs),
        num_layers=config.layers,
        inputs=config.inputs,
        stream=PAIR_STREAM,
    )


PAIR = Family(
    config=PairConfig,
    build=pair,
    presets={
        "tiny-pair": PairConfig(
            layers=2, embed=32, residues=32, heads=4, head_dim=8, channels=32, bins=16
        ),
        "evoformer-pair": PairConfig(layers=48, embed=128, residues=256),
    },
    fuzzed=(
        "--preset tiny-pair --model layers=2,embed=8,residues=8,heads=2,head_dim=4,"
        "channels=8,ffn=16,bins=5,init_std=0.25",
        "--preset tiny-pair --model layers=3,embed=12,residues=24,heads=3,head_dim=4,"
        "channels=24,ffn=24,bins=6,init_std=0.25 "
        "--with-rules pair_rows=tensor,pair_columns=context",
    ),
)
"""The second with the sizes of AlphaFold 2's pair stack (Jumper et al. 2021). Those
fuzzed start wider: norms of small values magnify roundings beyond the bound."""
