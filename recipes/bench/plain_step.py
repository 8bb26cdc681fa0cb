"""A bf16 training step on one GPU in plain JAX; no meshpar.

What a careful engineer writes for GPT-2 and Llama: `lax.scan` over stacked blocks,
cuDNN attention, parameters in fp32 and arithmetic in bf16, fp32 norms and loss, AdamW
with clipping. `gpu.py` measures meshpar against it; both start from the same values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PlainModel:
    """The parts in which the two model families differ.

    Args:
        heads, kv_heads: Query heads, and the key/value heads they share.
        epsilon: Of the norms.
        frequencies: Rotary frequencies; None for GPT-2.
        attention: `cudnn` on a GPU, None elsewhere.
    """

    heads: int
    kv_heads: int
    epsilon: float
    frequencies: tuple[float, ...] | None
    attention: str | None

    def loss(self, params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        """Mean cross-entropy; `params` are fp32."""
        params = jax.tree.map(lambda value: value.astype(jnp.bfloat16), params)
        tokens = batch["tokens"]
        x = params["token_embed"][tokens]
        if self.frequencies is None:
            x = x + params["position_embed"][: tokens.shape[1]]
        x, _ = lax.scan(
            lambda x, layer: (self._block(layer, x), None), x, params["blocks"]
        )
        table = params.get("unembed", params["token_embed"])
        logits = jnp.einsum(
            "BTD,VD->BTV",
            self._norm(x, params["final_norm"]),
            table,
            preferred_element_type=jnp.float32,
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["targets"]
        )
        return jnp.mean(losses)

    def _block(self, layer: Params, x: jax.Array) -> jax.Array:
        # B batch, T seq, D embed, K kv heads, G queries per kv head + 2, H head_dim.
        attention, mlp = layer["attention"], layer["mlp"]
        normed = self._norm(x, layer["attention_norm"])
        qkv = jnp.einsum("BTD,DKGH->BTKGH", normed, attention["qkv"])
        mixed = self._attention(qkv + attention.get("bias", 0))
        branch = jnp.einsum("BTNH,NHD->BTD", mixed, attention["out"])
        x = x + branch + attention.get("out_bias", 0)
        normed = self._norm(x, layer["mlp_norm"])
        if "gate_up" in mlp:
            both = jnp.einsum("BTD,DPF->BTPF", normed, mlp["gate_up"])
            hidden = jax.nn.silu(both[:, :, 0]) * both[:, :, 1]
        else:
            up = jnp.einsum("BTD,DF->BTF", normed, mlp["up"]) + mlp["up_bias"]
            hidden = jax.nn.gelu(up, approximate=True)
        down = jnp.einsum("BTF,FD->BTD", hidden, mlp["down"])
        return x + down + mlp.get("down_bias", 0)

    def _attention(self, qkv: jax.Array) -> jax.Array:
        batch, seq, _, _, head_dim = qkv.shape
        q = qkv[:, :, :, :-2].reshape(batch, seq, self.heads, head_dim)
        k, v = qkv[:, :, :, -2], qkv[:, :, :, -1]
        if self.frequencies is not None:
            q, k = self._rotated(q), self._rotated(k)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=self.attention
        )

    def _rotated(self, x: jax.Array) -> jax.Array:
        angles = np.arange(x.shape[1])[:, None, None] * np.array(self.frequencies)
        cos, sin = np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)

    def _norm(self, x: jax.Array, norm: Params) -> jax.Array:
        values = x.astype(jnp.float32)
        if "bias" in norm:
            values = values - jnp.mean(values, axis=-1, keepdims=True)
        mean_square = jnp.mean(values * values, axis=-1, keepdims=True)
        normed = values * lax.rsqrt(mean_square + self.epsilon) * norm["scale"]
        return (normed + norm.get("bias", 0)).astype(x.dtype)


def plain_step(
    model: PlainModel, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[Params, Any, jax.Array]]:
    """(params, opt_state, batch) -> the next two, which are donated, and the loss."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, opt_state: Any, batch: dict[str, jax.Array]) -> tuple:
        loss, gradients = jax.value_and_grad(model.loss)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step
