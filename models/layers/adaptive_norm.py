"""Adaptive layer norm: scales, shifts and gates of each example by its condition."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar import Scope
from meshpar.models.layers.norm import layer_norm
from meshpar.models.layers.recomputed import recomputed


class Modulation(nnx.Module):
    """`parts` vectors of each example, `silu(condition) W + b`.

    Its matrix is split over the output, as that of an MLP, and one all-gather of
    `batch * parts * embed` values makes the vectors whole on every device.

    Args:
        embed: Size of the condition and of a vector.
        parts: How many vectors.
        std: Standard deviation of the initial weights; 0 begins without any effect,
            with gates closed (adaLN-zero).

    Reference: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers", 3.2.
    """

    def __init__(self, embed: int, parts: int, *, std: float, rngs: nnx.Rngs) -> None:
        draw = nnx.initializers.normal(std)
        self.weights = nnx.Param(
            draw(rngs.params(), (embed, parts, embed), jnp.float32),
            out_sharding=("embed", None, "mlp"),
        )
        self.bias = nnx.Param(jnp.zeros((parts, embed)), out_sharding=(None, "mlp"))

    def __call__(self, condition: jax.Array, scope: Scope) -> tuple[jax.Array, ...]:
        """(batch, embed) -> `parts` arrays (batch, 1, embed)."""
        vectors_BPD = jnp.einsum(
            "BC,CPD->BPD", jax.nn.silu(condition), self.weights[...]
        )
        vectors_BPD = scope.constrain(
            vectors_BPD + self.bias[...], ("batch", None, "mlp")
        )
        whole = scope.constrain(vectors_BPD, ("batch", None, "embed"))
        return tuple(whole[:, at, None] for at in range(whole.shape[1]))


def adaptive_norm(
    x: jax.Array, shift: jax.Array, scale: jax.Array, *, epsilon: float
) -> jax.Array:
    """`(x - mean(x)) / std(x) * (1 + scale) + shift`, in fp32.

    Args:
        x: (batch, tokens, embed).
        shift: (batch, 1, embed), as of `Modulation`.
        scale: The same.
        epsilon: Added to the variance.
    """
    return recomputed(functools.partial(_adaptive_norm, epsilon))(x, shift, scale)


def gated_sum(x: jax.Array, gate: jax.Array, branch: jax.Array) -> jax.Array:
    """`x + gate * branch` in fp32, rounded once: bf16 would round the product too.

    Args:
        x: (batch, tokens, embed).
        gate: (batch, 1, embed), as of `Modulation`.
        branch: Like `x`.
    """
    return recomputed(_gated_sum)(x, gate, branch)


def _adaptive_norm(
    epsilon: float, x: jax.Array, shift: jax.Array, scale: jax.Array
) -> jax.Array:
    return layer_norm(epsilon, x, 1 + scale.astype(jnp.float32), shift)


def _gated_sum(x: jax.Array, gate: jax.Array, branch: jax.Array) -> jax.Array:
    product = gate.astype(jnp.float32) * branch.astype(jnp.float32)
    return (x.astype(jnp.float32) + product).astype(x.dtype)
