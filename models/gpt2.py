"""GPT-2 (Radford et al. 2019): LayerNorm, learned positions, GELU, tied head."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar import InputError, Model, Scope, from_nnx
from meshpar.model.inputs import Batch
from meshpar.models.family import Family, workload_sizes
from meshpar.models.field_types import (
    check_dropout,
    check_field_types,
    check_heads,
    check_least_zero,
    check_sizes,
)
from meshpar.models.inputs import language_inputs
from meshpar.models.layers.layer_norm_block import RESIDUAL, LayerNormBlock
from meshpar.models.layers.norm import LayerNorm
from meshpar.parallel.head_loss import head_cross_entropy
from meshpar.parallel.sizes import LOGITS_BYTES
from meshpar.parallel.tensor import vocab_lookup
from meshpar.planner.workload.config_json import GPT2_FIELDS

WHOLE = ("batch", "seq", "embed")


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Shape of a GPT-2.

    Args:
        layers: Number of blocks.
        embed: Width of the residual stream.
        heads: Attention heads.
        vocab: Number of tokens.
        ffn: Hidden size of the MLP; `4 * embed` when 0.
        max_seq: Longest sequence, the number of learned positions.
        dropout: Share of values dropped after the embedding and each branch.
        norm_epsilon: Added to the variance.
        init_std: Standard deviation of the initial weights.
        logits_bytes: Most bytes of logits that a device holds at a time in the loss;
            0 is no limit.

    Raises:
        InputError: A size that is no whole number or below 1, another value of the
            wrong type, or heads that do not divide `embed`.
    """

    layers: int
    embed: int
    heads: int
    vocab: int
    ffn: int = 0
    max_seq: int = 1024
    dropout: float = 0.0
    norm_epsilon: float = 1e-5
    init_std: float = 0.02
    logits_bytes: int = LOGITS_BYTES

    def __post_init__(self) -> None:
        check_field_types(self)
        check_sizes(self, "layers", "embed", "heads", "vocab", "max_seq")
        check_least_zero(self, ffn="4 * embed", logits_bytes="no limit")
        check_heads(self.embed, self.heads)
        check_dropout(self.dropout)


class GPT2Ends(nnx.Module):
    """Token and position embedding, final norm and tied head."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs) -> None:
        draw = nnx.initializers.normal(config.init_std)
        self.dropout = config.dropout
        self.max_seq = config.max_seq
        self.logits_bytes = config.logits_bytes
        self.token_embed = nnx.Param(
            draw(rngs.params(), (config.vocab, config.embed)),
            out_sharding=("vocab", "embed"),
        )
        self.position_embed = nnx.Param(
            draw(rngs.params(), (config.max_seq, config.embed)),
            out_sharding=(None, "embed"),
        )
        self.final_norm = LayerNorm(
            config.embed, epsilon=config.norm_epsilon, rngs=rngs
        )

    def embed(self, batch: Batch, scope: Scope) -> jax.Array:
        """Tokens (batch, seq) -> (batch, seq, embed)."""
        tokens = batch["tokens"]
        seq = scope.seq_length(tokens.shape[1])
        if seq > self.max_seq:
            raise InputError(
                f"sequences of {seq} tokens, but the model has max_seq={self.max_seq} "
                "learned positions; shorten the sequences or raise max_seq",
                key="batch.sequence_too_long",
            )
        x = vocab_lookup(self.token_embed[...], tokens, scope)
        positions = scope.positions(tokens.shape[1])
        x = scope.constrain(x + self.position_embed[positions], RESIDUAL)
        return scope.dropout(x, self.dropout, "embed")

    def logits(self, x: jax.Array, scope: Scope) -> jax.Array:
        """(batch, seq, embed) -> fp32 (batch, seq, vocab)."""
        normed = scope.constrain(self.final_norm(x), WHOLE)
        logits = jnp.einsum(
            "BTD,VD->BTV",
            normed,
            self.token_embed[...],
            preferred_element_type=jnp.float32,
        )
        return scope.constrain(logits, ("batch", "seq", "vocab"))

    def head(self, x: jax.Array, batch: Batch, scope: Scope) -> tuple[Any, ...]:
        """Summed loss and summed weights of the tokens; evaluated, accuracy too."""
        return head_cross_entropy(
            self.final_norm(x),
            self.token_embed[...],
            batch["targets"],
            batch["weights"],
            scope,
            logits_bytes=self.logits_bytes,
            terms=not scope.training,
        )


def gpt2(config: GPT2Config) -> Model:
    """The model of a config, under meshpar's contract."""
    return from_nnx(
        ends=lambda rngs: GPT2Ends(config, rngs),
        block=lambda rngs: LayerNormBlock(config, rngs, causal=True),
        num_layers=config.layers,
        inputs=language_inputs(config.vocab, config.max_seq),
        per_token=True,
    )


GPT2 = Family(
    config=GPT2Config,
    build=gpt2,
    sizes=functools.partial(workload_sizes, **GPT2_FIELDS),
    fuzzed=("--model layers=6,hidden=32,heads=4,vocab=64,max_seq=16,dropout=0.2",),
)
"""The family; `models/presets.py` has the presets."""
