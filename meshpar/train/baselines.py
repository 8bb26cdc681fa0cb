"""What counting alone achieves on a text: the losses that a model must beat."""

from __future__ import annotations

import numpy as np


def unigram_loss(train: np.ndarray, validation: np.ndarray, vocab: int) -> float:
    """Mean `-log p(token)` on `validation`, p counted on `train`.

    Args:
        train: Tokens below `vocab`, to count.
        validation: Tokens below `vocab`, to predict.
        vocab: Number of tokens; every count starts at 1 (Laplace).

    Returns:
        Nats per token, over all tokens but the first.
    """
    counts = np.bincount(train, minlength=vocab) + 1.0
    return float(-np.mean(np.log(counts / counts.sum())[validation[1:]]))


def bigram_loss(train: np.ndarray, validation: np.ndarray, vocab: int) -> float:
    """Mean `-log p(token | token before)` on `validation`, p counted on `train`.

    Every pair starts with as much weight as its second token's share among all, so
    that unseen pairs fall back to the unigram (Jelinek and Mercer 1980).
    """
    unigram = np.bincount(train, minlength=vocab) + 1.0
    pairs = train[:-1].astype(np.int64) * vocab + train[1:]
    counts = np.bincount(pairs, minlength=vocab * vocab).reshape(vocab, vocab)
    smoothed = counts + unigram / unigram.sum()
    probabilities = smoothed / smoothed.sum(axis=1, keepdims=True)
    return float(-np.mean(np.log(probabilities[validation[:-1], validation[1:]])))
