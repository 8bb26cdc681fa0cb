"""A Llama and a GPT-2 of `models`, beside plain ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from meshpar.models.gpt2 import GPT2Config, gpt2
from meshpar.models.llama import LlamaConfig, llama
from tests.zoo.entry import Entry
from tests.zoo.plain import normal

EMBED, HEADS, FFN, VOCAB, SEQ = 16, 8, 32, 32, 8
HEAD_DIM = EMBED // HEADS
BASE = 10_000.0


class Attention(nnx.Module):
    def __init__(self, rngs, std, out_std, *, kv_heads, bias, causal, rotary=False):
        self.group, self.causal, self.rotary = HEADS // kv_heads, causal, rotary
        groups = (kv_heads, self.group + 2, HEAD_DIM)
        self.qkv = normal(rngs, (EMBED, *groups), std=std)
        self.out = normal(rngs, (HEADS, HEAD_DIM, EMBED), std=out_std)
        self.bias = nnx.Param(jnp.zeros(groups)) if bias else None
        self.out_bias = nnx.Param(jnp.zeros((EMBED,))) if bias else None

    def __call__(self, x, seen=None):
        qkv = jnp.tensordot(x, self.qkv[...], 1)
        qkv = qkv if self.bias is None else qkv + self.bias[...]
        q = qkv[..., : self.group, :].reshape(*x.shape[:2], HEADS, HEAD_DIM)
        k, v = qkv[..., -2, :], qkv[..., -1, :]
        if self.rotary:
            q, k = rotated(q), rotated(k)
        mask = None if seen is None else seen[:, None, None, :]
        y = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=self.causal)
        y = jnp.tensordot(y, self.out[...], 2)
        return y if self.out_bias is None else y + self.out_bias[...]


class PlainMLP(nnx.Module):
    def __init__(self, rngs, std, out_std):
        self.up = normal(rngs, (EMBED, FFN), std=std)
        self.up_bias = nnx.Param(jnp.zeros((FFN,)))
        self.down = normal(rngs, (FFN, EMBED), std=out_std)
        self.down_bias = nnx.Param(jnp.zeros((EMBED,)))

    def __call__(self, x):
        hidden = jax.nn.gelu(x @ self.up[...] + self.up_bias[...])
        return hidden @ self.down[...] + self.down_bias[...]


class GatedMLP(nnx.Module):
    def __init__(self, rngs, std, out_std):
        self.gate_up = normal(rngs, (EMBED, 2, FFN), std=std)
        self.down = normal(rngs, (FFN, EMBED), std=out_std)

    def __call__(self, x):
        gate, up = (x @ self.gate_up[:, at] for at in (0, 1))
        return (jax.nn.silu(gate) * up) @ self.down[...]


class LayerNormBlock(nnx.Module):
    """A block of GPT-2, or of a ViT where it is not causal."""

    def __init__(self, rngs, std, layers, epsilon, *, causal=True):
        out_std = std / (2 * layers) ** 0.5
        self.attention_norm = nnx.LayerNorm(EMBED, epsilon=epsilon, rngs=rngs)
        self.attention = Attention(
            rngs, std, out_std, kv_heads=HEADS, bias=True, causal=causal
        )
        self.mlp_norm = nnx.LayerNorm(EMBED, epsilon=epsilon, rngs=rngs)
        self.mlp = PlainMLP(rngs, std, out_std)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LlamaBlock(nnx.Module):
    def __init__(self, rngs, std, layers, epsilon):
        out_std = std / (2 * layers) ** 0.5
        self.attention_norm = nnx.RMSNorm(EMBED, epsilon=epsilon, rngs=rngs)
        self.attention = Attention(
            rngs,
            std,
            out_std,
            kv_heads=HEADS // 2,
            bias=False,
            causal=True,
            rotary=True,
        )
        self.mlp_norm = nnx.RMSNorm(EMBED, epsilon=epsilon, rngs=rngs)
        self.mlp = GatedMLP(rngs, std, out_std)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT2Ends(nnx.Module):
    def __init__(self, rngs, std, epsilon):
        self.token_embed = normal(rngs, (VOCAB, EMBED), std=std)
        self.position_embed = normal(rngs, (SEQ, EMBED), std=std)
        self.final_norm = nnx.LayerNorm(EMBED, epsilon=epsilon, rngs=rngs)

    def embed(self, batch):
        return self.token_embed[batch["tokens"]] + self.position_embed[...]

    def head(self, x, batch):
        logits = self.final_norm(x) @ self.token_embed[...].T
        return weighted(logits, batch["targets"], batch["weights"])


class LlamaEnds(nnx.Module):
    def __init__(self, rngs, std, epsilon):
        self.token_embed = normal(rngs, (VOCAB, EMBED), std=std)
        self.final_norm = nnx.RMSNorm(EMBED, epsilon=epsilon, rngs=rngs)
        self.unembed = normal(rngs, (VOCAB, EMBED), std=std)

    def embed(self, batch):
        return self.token_embed[batch["tokens"]]

    def head(self, x, batch):
        logits = self.final_norm(x) @ self.unembed[...].T
        return weighted(logits, batch["targets"], batch["weights"])


def weighted(logits, labels, weights):
    """Summed cross-entropy and summed weights."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * weights), jnp.sum(weights)


def rotated(x):
    """Dims (i, i + head_dim / 2) of each head turned by position and frequency."""
    half = x.shape[-1] // 2
    frequencies = BASE ** (-np.arange(half) / half)
    angles = np.arange(x.shape[1])[:, None, None] * frequencies
    pairs = jax.lax.complex(x[..., :half], x[..., half:])
    turned = pairs * np.exp(1j * angles).astype(np.complex64)
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (8, SEQ + 1))
    weights = (rng.random((8, SEQ)) < 0.6).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


STD = 0.2

LLAMA = Entry(
    model=lambda layers: llama(
        LlamaConfig(
            layers=layers,
            embed=EMBED,
            heads=HEADS,
            kv_heads=HEADS // 2,
            ffn=FFN,
            vocab=VOCAB,
            init_std=STD,
        )
    ),
    ends=lambda rngs: LlamaEnds(rngs, STD, 1e-5),
    groups=lambda layers: {
        "blocks": (lambda rngs: LlamaBlock(rngs, STD, layers, 1e-5), layers)
    },
    batch=batch,
    tensor=4,
)

GPT2 = Entry(
    model=lambda layers: gpt2(
        GPT2Config(
            layers=layers,
            embed=EMBED,
            heads=HEADS,
            ffn=FFN,
            vocab=VOCAB,
            max_seq=SEQ,
            init_std=STD,
        )
    ),
    ends=lambda rngs: GPT2Ends(rngs, STD, 1e-5),
    groups=lambda layers: {
        "blocks": (lambda rngs: LayerNormBlock(rngs, STD, layers, 1e-5), layers)
    },
    batch=batch,
)
