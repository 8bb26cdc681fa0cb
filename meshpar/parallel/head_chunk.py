"""The cross-entropy of a chunk of tokens, over this device's part of the vocabulary."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked
from meshpar.parallel.tensor import as_index, in_vocab, shard_index


class Chunk:
    """The loss of some tokens over this device's part of the vocabulary."""

    def __init__(
        self,
        *,
        x: jax.Array,
        table: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        vocab_axes: tuple[str, ...],
    ) -> None:
        # C tokens of the chunk, V vocab (local), D embed.
        self.x, self._weights = x, weights
        num_rows = table.shape[0]
        logits_CV = matmul("CD,VD->CV", x, table, jnp.float32)
        highest = jnp.max(logits_CV, axis=-1)
        with asked("vocab_loss"):
            highest = lax.pmax(highest, vocab_axes) if vocab_axes else highest
        shifted_CV = logits_CV - highest[:, None]
        row = as_index(targets) - num_rows * shard_index(vocab_axes)
        # Found by comparing indices, not by a gather (`parallel.tensor`).
        index = lax.broadcasted_iota(jnp.int32, logits_CV.shape, 1)
        hit_CV = index == row[:, None]
        self._exp_CV, self._hit_CV = jnp.exp(shifted_CV), hit_CV
        sums = (
            jnp.sum(self._exp_CV, axis=-1),
            jnp.sum(jnp.where(hit_CV, shifted_CV, 0.0), axis=-1),
        )
        if vocab_axes:
            with asked("vocab_loss"):
                sums = tuple(lax.psum(jnp.stack(sums), vocab_axes))
        self._total, self._target = sums
        vocab = num_rows * math.prod(lax.axis_size(axis) for axis in vocab_axes)
        self._known = in_vocab(targets, vocab) | (weights == 0)

    def losses(self) -> jax.Array:
        """Of each token, not weighted: the gradient for the weights."""
        return jnp.where(self._known, jnp.log(self._total) - self._target, 0.0)

    def loss(self) -> jax.Array:
        """The weighted sum; NaN if a token that counts has a target outside."""
        weighted = self.losses() * self._weights
        return jnp.sum(jnp.where(self._known, weighted, jnp.nan))

    def logits_gradient(self) -> jax.Array:
        """(softmax - one-hot) * weight, in the dtype that matmuls take."""
        scale = jnp.where(self._known, self._weights, 0.0)[:, None]
        softmax_CV = self._exp_CV / self._total[:, None]
        return ((softmax_CV - self._hit_CV) * scale).astype(self.x.dtype)


def matmul(dims: str, one: jax.Array, other: jax.Array, dtype: Any) -> jax.Array:
    return jnp.einsum(dims, one, other, preferred_element_type=dtype)
