"""Text sampled from a model under any layout."""

from __future__ import annotations

import numpy as np

from meshpar.train.state import TrainState
from meshpar.train.step import TrainStep


def sample_tokens(
    step: TrainStep,
    state: TrainState,
    prompt: np.ndarray,
    *,
    num_tokens: int,
    seq: int,
    vocab: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> np.ndarray:
    """`prompt` and `num_tokens` more tokens, each drawn from `softmax(logits / t)`.

    Each token costs one forward pass over the last `seq` tokens: for a look at what a
    model has learned, not for serving.

    Args:
        step: The compiled step, for its layout.
        state: The parameters to use.
        prompt: (at least 1,) tokens.
        num_tokens: How many to draw.
        seq: Tokens that the model sees at once.
        vocab: Only tokens below it are drawn.
        temperature: Lower is more certain.
        seed: Of the draws.
    """
    generator = np.random.default_rng(seed)
    tokens = [int(token) for token in prompt]
    num_rows = len(step.rows_here(step.layout.batch_shards))
    for _ in range(num_tokens):
        recent = tokens[-seq:]
        window = np.zeros((num_rows, seq), np.int32)
        window[:, : len(recent)] = recent
        # All rows are alike, so that each process can read those of its own devices.
        here = step.logits(state, window).addressable_shards[0].data
        logits = np.asarray(here[0, len(recent) - 1, :vocab])
        scaled = (logits - logits.max()).astype(np.float64) / temperature
        weights = np.exp(scaled)
        tokens.append(int(generator.choice(vocab, p=weights / weights.sum())))
    return np.array(tokens)
