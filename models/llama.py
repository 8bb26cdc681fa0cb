"""The Llama family: RMSNorm, rotary positions, grouped heads, SwiGLU.

Llama 2 and 3, Qwen2, Qwen3 and SmolLM2 are settings of it (`meshpar.models.presets`).
"""

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
    check_field_types,
    check_heads,
    check_kv_heads,
    check_least_zero,
    check_rotated,
    check_sizes,
)
from meshpar.models.inputs import language_inputs
from meshpar.models.layers.attention import Attention, depth_scaled_std
from meshpar.models.layers.mlp import GatedMLP
from meshpar.models.layers.norm import RMSNorm
from meshpar.models.layers.rope import RopeScaling, rope_frequencies
from meshpar.parallel.head_loss import head_cross_entropy
from meshpar.parallel.sizes import LOGITS_BYTES
from meshpar.parallel.tensor import vocab_lookup
from meshpar.planner.workload.config_json import LLAMA_FIELDS

RESIDUAL = ("batch", "residual_seq", "embed")
WHOLE = ("batch", "seq", "embed")


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape of a Llama-like model.

    Args:
        layers: Number of blocks.
        embed: Width of the residual stream.
        heads: Attention heads.
        kv_heads: Key and value heads; each serves `heads / kv_heads` queries.
        ffn: Hidden size of the MLP.
        vocab: Number of tokens.
        head_dim: Size of a head; `embed / heads` when 0.
        max_seq: Longest sequence, no limit when 0; it has no other effect.
        tied: Whether the head reuses the embedding table.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: Stretching for long contexts, if any.
        qkv_bias: Biases on queries, keys and values (Qwen2).
        qk_norm: RMSNorm on queries and keys (Qwen3).
        window: A token attends to those less than so many places before it (Jiang et
            al. 2023, Mistral); 0 is no limit.
        norm_epsilon: Added to the mean square.
        init_std: Standard deviation of the initial weights.
        logits_bytes: Most bytes of logits that a device holds at a time in the loss;
            0 is no limit.

    Raises:
        InputError: A size that is no whole number or below 1, another value of the
            wrong type, or heads that do not divide.
    """

    layers: int
    embed: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int = 0
    max_seq: int = 0
    tied: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int = 0
    norm_epsilon: float = 1e-5
    init_std: float = 0.02
    logits_bytes: int = LOGITS_BYTES

    def __post_init__(self) -> None:
        check_field_types(self)
        check_sizes(self, "layers", "embed", "heads", "kv_heads", "ffn", "vocab")
        no_limit = dict.fromkeys(("max_seq", "window", "logits_bytes"), "no limit")
        check_least_zero(self, head_dim="embed / heads", **no_limit)
        check_kv_heads(self.heads, self.kv_heads)
        check_heads(self.embed, self.heads, self.head_dim)
        check_rotated(self.size_per_head)

    @property
    def size_per_head(self) -> int:
        """Size of a head."""
        return self.head_dim or self.embed // self.heads


class LlamaBlock(nnx.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        out_std = depth_scaled_std(config.init_std, config.layers)
        epsilon = config.norm_epsilon
        self.attention_norm = RMSNorm(config.embed, epsilon=epsilon, rngs=rngs)
        self.attention = Attention(
            config.embed,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.size_per_head,
            init_std=config.init_std,
            out_std=out_std,
            rngs=rngs,
            frequencies=rope_frequencies(
                config.size_per_head, config.rope_theta, config.rope_scaling
            ),
            bias=config.qkv_bias,
            qk_norm_epsilon=epsilon if config.qk_norm else None,
            window=config.window or None,
        )
        self.mlp_norm = RMSNorm(config.embed, epsilon=epsilon, rngs=rngs)
        self.mlp = GatedMLP(
            config.embed,
            config.ffn,
            init_std=config.init_std,
            out_std=out_std,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, scope: Scope) -> jax.Array:
        """(batch, seq, embed) -> (batch, seq, embed)."""
        normed = scope.constrain(self.attention_norm(x), RESIDUAL)
        normed = scope.save(normed, "attention_normed")
        branch = scope.constrain(self.attention(normed, scope), RESIDUAL)
        x = x + scope.save(branch, "attention_out")
        normed = scope.constrain(self.mlp_norm(x), RESIDUAL)
        normed = scope.save(normed, "mlp_normed")
        return x + scope.constrain(self.mlp(normed, scope), RESIDUAL)


class LlamaEnds(nnx.Module):
    """Token embedding, final norm and head.

    Args:
        config: With vocab, embed, max_seq, norm_epsilon, init_std and logits_bytes.
        tied: Whether the head reuses the embedding table.
        embed_scale: What embeddings are multiplied by (Gemma).
        around_one: As in `RMSNorm`.
    """

    def __init__(
        self,
        config: Any,
        rngs: nnx.Rngs,
        *,
        tied: bool,
        embed_scale: float = 1.0,
        around_one: bool = False,
    ) -> None:
        shape, axes = (config.vocab, config.embed), ("vocab", "embed")
        draw = nnx.initializers.normal(config.init_std)
        self.max_seq = config.max_seq
        self.logits_bytes, self.embed_scale = config.logits_bytes, embed_scale
        self.token_embed = nnx.Param(draw(rngs.params(), shape), out_sharding=axes)
        self.final_norm = RMSNorm(
            config.embed,
            epsilon=config.norm_epsilon,
            rngs=rngs,
            around_one=around_one,
        )
        self.unembed = (
            None if tied else nnx.Param(draw(rngs.params(), shape), out_sharding=axes)
        )

    def embed(self, batch: Batch, scope: Scope) -> jax.Array:
        """Tokens (batch, seq) -> (batch, seq, embed)."""
        tokens = batch["tokens"]
        seq = scope.seq_length(tokens.shape[1])
        if 0 < self.max_seq < seq:
            raise InputError(
                f"sequences of {seq} tokens, but the model has max_seq={self.max_seq}; "
                "shorten the sequences or raise max_seq",
                key="batch.sequence_too_long",
            )
        x = vocab_lookup(self.token_embed[...], tokens, scope)
        if self.embed_scale != 1.0:
            # In the dtype of the stream, as Gemma's: in bf16 the root is rounded.
            x = x * jnp.asarray(self.embed_scale, x.dtype)
        return scope.constrain(x, RESIDUAL)

    def logits(self, x: jax.Array, scope: Scope) -> jax.Array:
        """(batch, seq, embed) -> fp32 (batch, seq, vocab)."""
        normed = scope.constrain(self.final_norm(x), WHOLE)
        logits = jnp.einsum(
            "BTD,VD->BTV", normed, self._table(), preferred_element_type=jnp.float32
        )
        return scope.constrain(logits, ("batch", "seq", "vocab"))

    def head(self, x: jax.Array, batch: Batch, scope: Scope) -> tuple[Any, ...]:
        """Summed loss and summed weights of the tokens; evaluated, accuracy too."""
        return head_cross_entropy(
            self.final_norm(x),
            self._table(),
            batch["targets"],
            batch["weights"],
            scope,
            logits_bytes=self.logits_bytes,
            terms=not scope.training,
        )

    def _table(self) -> jax.Array:
        return (self.token_embed if self.unembed is None else self.unembed)[...]


def llama(config: LlamaConfig) -> Model:
    """The model of a config, under meshpar's contract."""
    return from_nnx(
        ends=lambda rngs: LlamaEnds(config, rngs, tied=config.tied),
        block=lambda rngs: LlamaBlock(config, rngs),
        num_layers=config.layers,
        inputs=language_inputs(config.vocab),
        per_token=True,
    )


LLAMA = Family(
    config=LlamaConfig,
    build=llama,
    sizes=functools.partial(workload_sizes, **LLAMA_FIELDS),
    fuzzed=(
        "--model layers=4,gated=true,hidden=32,heads=4,kv_heads=2,ffn=64,vocab=64,"
        "tied=true,logits_bytes=3000",
        "--model layers=1,gated=true,hidden=32,heads=8,kv_heads=8,ffn=64,vocab=64,"
        "tied=false",
        "--model layers=5,gated=true,hidden=48,heads=6,kv_heads=3,ffn=96,vocab=72,"
        "qk_norm=true,logits_bytes=2000",
        "--model layers=3,gated=true,hidden=40,heads=5,kv_heads=5,ffn=60,vocab=70,"
        "qkv_bias=true",
    ),
)
"""The family; `models/presets.py` has the presets."""
