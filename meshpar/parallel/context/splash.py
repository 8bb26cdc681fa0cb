"""Splash attention: one TPU kernel for scores, softmax and mixed values of a device.

Its limits stand in `meshpar.hardware.attention_choice`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshpar.parallel.context.mask import Mask
from meshpar.parallel.context.splash_kernel import Side, Splash
from meshpar.parallel.mean_loss import scaled


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    *,
    mask: Mask,
    interpret: bool = False,
) -> jax.Array:
    """Attention to whole sequences, which keeps no scores for its backward.

    Communicates nothing. Scores and softmax are made in fp32. The backward is two
    kernels, of queries and of keys and values, which make the scores once more each.

    Args:
        q: (batch, queries, heads, head_dim).
        k: (batch, keys, kv_heads, head_dim); each head serves as many queries' in turn.
        v: As `k`.
        segments: (batch, tokens) int32 of queries and keys alike: a query sees keys of
            its own number alone, and none if that is below 0. None where all are one.
        mask: Which keys a query sees by their places, its own among them; no prefix.
        interpret: Whether to run the kernel as JAX operations, where there is no TPU.

    Returns:
        (batch, queries, heads, head_dim), the dtype of `q`; zeros for a query of a
        segment below 0.
    """
    heads_first = (jnp.swapaxes(x, 1, 2) for x in (over_root(q), k, v))
    q_BNTH, *keys = heads_first
    kernel = Splash(mask=mask, interpret=interpret)
    mixed = kernel(Side((q_BNTH,), segments), Side(tuple(keys), segments))
    return without_padding(jnp.swapaxes(mixed, 1, 2), segments)


def over_root(q: jax.Array) -> jax.Array:
    """Queries over the root of their size, as the kernel wants them."""
    return scaled(q, q.shape[-1] ** -0.5)


def without_padding(mixed_BTNH: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Zeros in place of tokens of a segment below 0, which the kernel lets see."""
    if segments is None:
        return mixed_BTNH
    return jnp.where((segments >= 0)[:, :, None, None], mixed_BTNH, 0)
