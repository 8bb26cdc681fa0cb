"""An encoder-decoder in the manner of T5 (Raffel et al. 2020).

As there: RMSNorm before every branch, one table for both embeddings and the head, no
biases in attention. Unlike there, unless options say so: positions are learned vectors
added to the embedding, not a bias of the scores, and scores are scaled, so that fused
attention fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar import Blocks, Input, InputError, Model, Scope, from_nnx
from meshpar.model.inputs import Batch
from meshpar.models.family import Family
from meshpar.models.field_types import (
    check_dropout,
    check_field_types,
    check_heads,
    check_least_zero,
    check_sizes,
)
from meshpar.models.inputs import all_below
from meshpar.models.layers.attention import Attention, depth_scaled_std, normal
from meshpar.models.layers.cross_attention import CrossAttention
from meshpar.models.layers.mlp import ACTIVATIONS, Activation, GatedMLP, PlainMLP
from meshpar.models.layers.norm import RMSNorm
from meshpar.parallel.head_loss import head_cross_entropy
from meshpar.parallel.sizes import LOGITS_BYTES
from meshpar.parallel.tensor import vocab_lookup

_RESIDUAL = ("batch", "residual_seq", "embed")
_BIAS = "bias"
_SIZES = ("encoder_layers", "decoder_layers", "embed", "heads", "ffn", "vocab")

INPUTS = {
    "source_tokens": Input(("batch", "source_seq"), "int"),
    "source_mask": Input(("batch", "source_seq"), "bool", optional=True),
    "target_tokens": Input(("batch", "seq"), "int"),
    "labels": Input(("batch", "seq"), "int", counted_by="weights"),
    "weights": Input(("batch", "seq"), "float", is_weight=True),
}
"""Inputs of a batch: source tokens and their mask, target tokens, labels, weights."""
_TOKENS = ("source_tokens", "target_tokens", "labels")


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """Shape of an encoder-decoder.

    Args:
        encoder_layers: Blocks of the encoder.
        decoder_layers: Blocks of the decoder.
        embed: Width of the residual stream.
        heads: Attention heads.
        ffn: Hidden size of the MLP.
        vocab: Number of tokens.
        head_dim: Size of a head; `embed / heads` when 0.
        max_seq: Longest source and longest target, the number of learned positions.
        gated: Whether the MLPs are gated (SwiGLU); otherwise GELU with biases.
        activation: Of the MLPs in place of those.
        mlp_bias: Whether MLPs that are not gated have biases.
        relative_buckets: Size of T5's table of biases of the scores, in place of
            learned positions; 0 for those.
        relative_distance: From where on all are in its last bucket.
        scaled_scores: Whether scores are divided by the root of a head's size.
        tied: Whether the head is the embedding table.
        scaled_head: Whether what it reads is divided by the root of `embed`.
        dropout: Share of values dropped after the embeddings and each branch.
        norm_epsilon: Added to the mean square.
        init_std: Standard deviation of the initial weights.
        logits_bytes: Most bytes of logits that a device holds at a time in the loss;
            0 is no limit.

    Raises:
        InputError: A size that is no whole number or below 1, another value of the
            wrong type, or heads that do not divide `embed`.
    """

    encoder_layers: int
    decoder_layers: int
    embed: int
    heads: int
    ffn: int
    vocab: int
    head_dim: int = 0
    max_seq: int = 512
    gated: bool = False
    activation: Activation | None = None
    mlp_bias: bool = True
    relative_buckets: int = 0
    relative_distance: int = 128
    scaled_scores: bool = True
    tied: bool = True
    scaled_head: bool = False
    dropout: float = 0.0
    norm_epsilon: float = 1e-6
    init_std: float = 0.02
    logits_bytes: int = LOGITS_BYTES

    def __post_init__(self) -> None:
        check_field_types(self)
        check_sizes(self, *_SIZES, "max_seq")
        check_least_zero(self, head_dim="embed / heads", logits_bytes="no limit")
        check_least_zero(self, relative_buckets="learned positions")
        if self.activation not in (None, *ACTIVATIONS):
            raise InputError(
                f"activation={self.activation!r}: must be one of "
                f"{', '.join(ACTIVATIONS)}",
                key="model.unknown_activation",
            )
        _check_buckets(self)
        check_heads(self.embed, self.heads, self.head_dim)
        check_dropout(self.dropout)

    @property
    def layers(self) -> int:
        """Blocks of both groups."""
        return self.encoder_layers + self.decoder_layers

    @property
    def size_per_head(self) -> int:
        """Size of a head."""
        return self.head_dim or self.embed // self.heads


def _check_buckets(config: EncoderDecoderConfig) -> None:
    buckets, distance = config.relative_buckets, config.relative_distance
    if buckets and (buckets % 4 or distance <= buckets // 2):
        raise InputError(
            f"relative_buckets={buckets}, relative_distance={distance}: buckets must "
            "divide by 4, and the distance be above half of them",
            key="model.invalid_relative_buckets",
        )


class EncoderBlock(nnx.Module):
    """Attention to the whole source and MLP, each after a norm, added to the stream."""

    def __init__(self, config: EncoderDecoderConfig, rngs: nnx.Rngs) -> None:
        self.dropout = config.dropout
        self.attention_norm = _norm(config, rngs)
        self.attention = _attention(config, rngs, causal=False)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = _mlp(config, rngs)

    def __call__(
        self, stream: dict[str, jax.Array], scope: Scope
    ) -> dict[str, jax.Array]:
        """Encoded source (batch, source_seq, embed) -> the same."""
        x, seen = stream["encoded"], scope.batch.get("source_mask")
        normed = scope.constrain(self.attention_norm(x), _RESIDUAL)
        bias = stream.get(_BIAS)
        branch = scope.constrain(self.attention(normed, scope, seen, bias), _RESIDUAL)
        x = x + scope.dropout(branch, self.dropout, "attention")
        normed = scope.constrain(self.mlp_norm(x), _RESIDUAL)
        branch = scope.constrain(self.mlp(normed, scope), _RESIDUAL)
        encoded = x + scope.dropout(branch, self.dropout, "mlp")
        return {**stream, "encoded": encoded}


class DecoderBlock(nnx.Module):
    """Causal attention, attention to the encoded source, and MLP."""

    def __init__(self, config: EncoderDecoderConfig, rngs: nnx.Rngs) -> None:
        self.dropout = config.dropout
        self.attention_norm = _norm(config, rngs)
        self.attention = _attention(config, rngs, causal=True)
        self.cross_norm = _norm(config, rngs)
        self.cross = CrossAttention(
            config.embed,
            heads=config.heads,
            head_dim=config.size_per_head,
            init_std=config.init_std,
            out_std=_out_std(config),
            rngs=rngs,
            score_scale=None if config.scaled_scores else 1.0,
        )
        self.mlp_norm = _norm(config, rngs)
        self.mlp = _mlp(config, rngs)

    def __call__(
        self, stream: dict[str, jax.Array], scope: Scope
    ) -> dict[str, jax.Array]:
        """Decoded target (batch, seq, embed) -> the same; the source goes through."""
        x, encoded = stream["decoded"], stream["encoded"]
        seen = scope.batch.get("source_mask")
        normed = scope.constrain(self.attention_norm(x), _RESIDUAL)
        bias = stream.get(_BIAS)
        branch = scope.constrain(self.attention(normed, scope, None, bias), _RESIDUAL)
        x = x + scope.dropout(branch, self.dropout, "attention")
        normed = scope.constrain(self.cross_norm(x), _RESIDUAL)
        branch = scope.constrain(self.cross(normed, encoded, scope, seen), _RESIDUAL)
        x = x + scope.dropout(branch, self.dropout, "cross")
        normed = scope.constrain(self.mlp_norm(x), _RESIDUAL)
        branch = scope.constrain(self.mlp(normed, scope), _RESIDUAL)
        decoded = x + scope.dropout(branch, self.dropout, "mlp")
        return {**stream, "decoded": decoded}


class EncoderDecoderEnds(nnx.Module):
    """Embeddings of source and target, final norms and tied head."""

    def __init__(self, config: EncoderDecoderConfig, rngs: nnx.Rngs) -> None:
        self.dropout = config.dropout
        self.max_seq = 0 if config.relative_buckets else config.max_seq
        self.head_factor = config.embed**-0.5 if config.scaled_head else None
        self.logits_bytes = config.logits_bytes
        embed, std = config.embed, config.init_std
        positions = (config.max_seq, embed), std, (None, "embed")
        self.token_embed = normal(
            (config.vocab, embed), std, ("vocab", "embed"), rngs=rngs
        )
        learned = not config.relative_buckets
        self.source_positions = normal(*positions, rngs=rngs) if learned else None
        self.target_positions = normal(*positions, rngs=rngs) if learned else None
        table = (config.relative_buckets, config.heads), std, (None, "heads")
        self.source_bias = None if learned else normal(*table, rngs=rngs)
        self.target_bias = None if learned else normal(*table, rngs=rngs)
        self.encoder_norm = _norm(config, rngs)
        self.decoder_norm = _norm(config, rngs)
        shape, axes = (config.vocab, embed), ("vocab", "embed")
        self.unembed = None if config.tied else normal(shape, std, axes, rngs=rngs)

    def embed(self, batch: Batch, scope: Scope) -> dict[str, jax.Array]:
        """Source tokens (batch, source_seq) -> the encoder's stream."""
        tokens = batch["source_tokens"]
        x = self._embedded(tokens, self.source_positions, "source", scope)
        return {"encoded": x, **gather_bias(self.source_bias, tokens)}

    def decode(
        self, stream: dict[str, jax.Array], scope: Scope
    ) -> dict[str, jax.Array]:
        """The encoder's stream -> the decoder's, which holds both."""
        tokens = scope.batch["target_tokens"]
        return {
            "encoded": scope.constrain(self.encoder_norm(stream["encoded"]), _RESIDUAL),
            "decoded": self._embedded(tokens, self.target_positions, "target", scope),
            **gather_bias(self.target_bias, tokens),
        }

    def logits(self, stream: dict[str, jax.Array], scope: Scope) -> jax.Array:
        """The decoder's stream -> fp32 (batch, seq, vocab)."""
        logits = jnp.einsum(
            "BTD,VD->BTV",
            scope.constrain(self._read(stream), ("batch", "seq", "embed")),
            self._table(),
            preferred_element_type=jnp.float32,
        )
        return scope.constrain(logits, ("batch", "seq", "vocab"))

    def head(
        self, stream: dict[str, jax.Array], batch: Batch, scope: Scope
    ) -> tuple[Any, ...]:
        """Summed loss and weights of the target's tokens; evaluated, accuracy too."""
        return head_cross_entropy(
            self._read(stream),
            self._table(),
            batch["labels"],
            batch["weights"],
            scope,
            logits_bytes=self.logits_bytes,
            terms=not scope.training,
        )

    def _read(self, stream: dict[str, jax.Array]) -> jax.Array:
        """Return the head's input."""
        normed = self.decoder_norm(stream["decoded"])
        return normed if self.head_factor is None else normed * self.head_factor

    def _table(self) -> jax.Array:
        return (self.token_embed if self.unembed is None else self.unembed)[...]

    def _embedded(
        self, tokens: jax.Array, positions: nnx.Param | None, name: str, scope: Scope
    ) -> jax.Array:
        seq, length = tokens.shape[1], scope.seq_length(tokens.shape[1])
        if 0 < self.max_seq < length:
            raise InputError(
                f"{name} sequences of {length} tokens, but the model has "
                f"max_seq={self.max_seq} learned positions; shorten the sequences or "
                "raise max_seq",
                key="batch.sequence_too_long",
            )
        x = vocab_lookup(self.token_embed[...], tokens, scope)
        if positions is not None:
            # Indexed, not cut, which GSPMD would shift where the sequence is split.
            x = x + positions[...][scope.positions(seq)]
        return scope.dropout(scope.constrain(x, _RESIDUAL), self.dropout, name)


def encoder_decoder(config: EncoderDecoderConfig) -> Model:
    """The model of a config, under meshpar's contract."""
    encoded = {"encoded": _RESIDUAL}
    if config.relative_buckets:
        encoded[_BIAS] = ("batch", None, "heads")
    return from_nnx(
        ends=lambda rngs: EncoderDecoderEnds(config, rngs),
        groups={
            "encoder": Blocks(
                block=lambda rngs: EncoderBlock(config, rngs),
                num_layers=config.encoder_layers,
                stream=encoded,
            ),
            "decoder": Blocks(
                block=lambda rngs: DecoderBlock(config, rngs),
                num_layers=config.decoder_layers,
                enter="decode",
                stream={**encoded, "decoded": _RESIDUAL},
            ),
        },
        inputs=all_below(config.vocab, INPUTS, _TOKENS),
    )


def gather_bias(table: nnx.Param | None, tokens: jax.Array) -> dict[str, jax.Array]:
    """The table beside every example, so that it flows with the stream."""
    if table is None:
        return {}
    shape = (tokens.shape[0], *table[...].shape)
    return {_BIAS: jnp.broadcast_to(table[...], shape)}


def _norm(config: EncoderDecoderConfig, rngs: nnx.Rngs) -> RMSNorm:
    return RMSNorm(config.embed, epsilon=config.norm_epsilon, rngs=rngs)


def _attention(
    config: EncoderDecoderConfig, rngs: nnx.Rngs, *, causal: bool
) -> Attention:
    return Attention(
        config.embed,
        heads=config.heads,
        kv_heads=config.heads,
        head_dim=config.size_per_head,
        init_std=config.init_std,
        out_std=_out_std(config),
        rngs=rngs,
        causal=causal,
        score_scale=None if config.scaled_scores else 1.0,
        bias_distance=config.relative_distance,
    )


def _mlp(config: EncoderDecoderConfig, rngs: nnx.Rngs) -> GatedMLP | PlainMLP:
    stds = {"init_std": config.init_std, "out_std": _out_std(config)}
    sizes = config.embed, config.ffn
    if config.gated:
        activation = config.activation or "silu"
        return GatedMLP(*sizes, rngs=rngs, activation=activation, **stds)
    activation = config.activation or "gelu_tanh"
    bias = config.mlp_bias
    return PlainMLP(*sizes, rngs=rngs, activation=activation, bias=bias, **stds)


def _out_std(config: EncoderDecoderConfig) -> float:
    return depth_scaled_std(config.init_std, config.layers)


_T5 = {"head_dim": 64, "vocab": 32_128}

ENCODER_DECODER = Family(
    config=EncoderDecoderConfig,
    build=encoder_decoder,
    presets={
        "tiny-t5": EncoderDecoderConfig(
            encoder_layers=2, decoder_layers=2, embed=128, heads=8, ffn=512, vocab=256
        ),
        "t5-small": EncoderDecoderConfig(
            encoder_layers=6, decoder_layers=6, embed=512, heads=8, ffn=2048, **_T5
        ),
        "t5-base": EncoderDecoderConfig(
            encoder_layers=12, decoder_layers=12, embed=768, heads=12, ffn=3072, **_T5
        ),
    },
    fuzzed=(
        "--preset tiny-t5 --model encoder_layers=3,decoder_layers=2,embed=32,heads=4,"
        "ffn=64,vocab=64,logits_bytes=2000",
        "--preset tiny-t5 --model encoder_layers=2,decoder_layers=4,embed=48,heads=6,"
        "ffn=96,vocab=72,gated=true,dropout=0.1",
    ),
)
"""With the sizes of Raffel et al. 2020, section 3.7; this module says where it
differs."""
