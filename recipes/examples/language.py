"""Batches of random tokens, and the loss of a language model on them."""

from __future__ import annotations

import jax
import numpy as np
import optax

VOCAB, SEQ = 64, 16


def token_loss(
    logits: jax.Array, batch: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return the summed cross-entropy of logits, and the summed weights."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (losses * batch["weights"]).sum(), batch["weights"].sum()


def batch() -> dict[str, np.ndarray]:
    """Return 8 examples, the same in every call."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (8, SEQ + 1))
    weights = np.ones((8, SEQ), np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
