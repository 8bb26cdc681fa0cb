"""Normalisation over the embed dim, computed in fp32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from meshpar.models.layers.recomputed import recomputed
from meshpar.parallel.tensor import AnyArray


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` (Zhang and Sennrich 2019).

    Args:
        size: Of the dim.
        epsilon: Added to the mean square.
        logical_axis: Of the dim.
        around_one: Whether the parameter is `scale - 1`, which starts at 0 (Gemma).
    """

    def __init__(
        self,
        size: int,
        *,
        epsilon: float,
        rngs: nnx.Rngs,
        logical_axis: str | None = "embed",
        around_one: bool = False,
    ) -> None:
        self.epsilon, self.around_one = epsilon, around_one
        start = nnx.initializers.zeros if around_one else nnx.initializers.ones
        self.scale = _vector(start, size, logical_axis, rngs)

    def __call__(
        self, x: Float[AnyArray, "*dims size"]
    ) -> Float[AnyArray, "*dims size"]:
        """(..., size) -> (..., size), the input's dtype."""
        norm = _rms_norm_around_one if self.around_one else _rms_norm
        return recomputed(norm, self.epsilon)(x, self.scale[...])


class LayerNorm(nnx.Module):
    """`(x - mean(x)) / std(x) * scale + bias` (Ba et al. 2016)."""

    def __init__(self, size: int, *, epsilon: float, rngs: nnx.Rngs) -> None:
        self.epsilon = epsilon
        self.scale = _vector(nnx.initializers.ones, size, "embed", rngs)
        self.bias = _vector(nnx.initializers.zeros, size, "embed", rngs)

    def __call__(
        self, x: Float[AnyArray, "*dims size"]
    ) -> Float[AnyArray, "*dims size"]:
        """(..., size) -> (..., size), the input's dtype."""
        return recomputed(layer_norm, self.epsilon)(x, self.scale[...], self.bias[...])


def _rms_norm(epsilon: float, x: jax.Array, scale: jax.Array) -> jax.Array:
    values = x.astype(jnp.float32)
    mean_square = jnp.mean(values * values, axis=-1, keepdims=True)
    normed = values * jax.lax.rsqrt(mean_square + epsilon)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def _rms_norm_around_one(epsilon: float, x: jax.Array, scale: jax.Array) -> jax.Array:
    return _rms_norm(epsilon, x, 1.0 + scale.astype(jnp.float32))


def layer_norm(
    epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> jax.Array:
    """`(x - mean(x)) / std(x) * scale + bias`, in fp32; the input's dtype."""
    values = x.astype(jnp.float32)
    values = values - jnp.mean(values, axis=-1, keepdims=True)
    variance = jnp.mean(values * values, axis=-1, keepdims=True)
    normed = values * jax.lax.rsqrt(variance + epsilon)
    scaled = normed * scale.astype(jnp.float32)
    return (scaled + bias.astype(jnp.float32)).astype(x.dtype)


def _vector(
    initializer: nnx.Initializer, size: int, logical_axis: str | None, rngs: nnx.Rngs
) -> nnx.Param:
    value = initializer(rngs.params(), (size,), jnp.float32)
    return nnx.Param(value, out_sharding=(logical_axis,))
