"""Masks: which tokens of a batch count, and how much. No jax: options name them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def _holes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 2, shape)


def _empty_rows(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    weights = _holes(rng, shape)
    weights[: (shape[0] + 1) // 2] = 0  # whole batch shards among them
    return weights


def _one_token(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    weights = np.zeros(shape)
    weights[tuple(rng.integers(size) for size in shape)] = 1
    return weights


MASKS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "full": lambda rng, shape: np.ones(shape),
    "holes": _holes,
    "empty_rows": _empty_rows,
    "fractions": lambda rng, shape: rng.random(shape),
    "one_token": _one_token,
}
"""Weights of the tokens of a batch, by name; where none is above 0, the last one is."""
