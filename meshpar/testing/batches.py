"""Batches that layouts are compared on: random tokens under a mask."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshpar import Model
from meshpar.errors import InputError

Arrays = dict[str, np.ndarray]


def _holes(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.integers(0, 2, shape)


def _empty_rows(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    weights = _holes(rng, shape)
    weights[: (shape[0] + 1) // 2] = 0  # whole batch shards among them
    return weights


def _one_token(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    weights = np.zeros(shape)
    weights[rng.integers(shape[0]), rng.integers(shape[1])] = 1
    return weights


MASKS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "full": lambda rng, shape: np.ones(shape),
    "holes": _holes,
    "empty_rows": _empty_rows,
    "fractions": lambda rng, shape: rng.random(shape),
    "one_token": _one_token,
}
"""Weights of the tokens of a batch, by name; where none is above 0, the last one is."""


def random_batch(vocab: int, global_batch: int, seq: int, seed: int) -> Arrays:
    """Tokens, the tokens that follow them, and weights of 1."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (global_batch, seq + 1), np.int32)
    weights = np.ones((global_batch, seq), np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def steps_of(batch: Arrays, mask: str, seed: int, num_steps: int) -> list[Arrays]:
    """A batch a step: the same examples in another order, under another mask.

    A batch without `weights` has nothing to mask.
    """
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(num_steps):
        order = rng.permutation(len(next(iter(batch.values()))))
        one = {name: np.asarray(array)[order] for name, array in batch.items()}
        if "weights" in one:
            one["weights"] = _masked(one["weights"], mask, rng)
        batches.append(one)
    return batches


def vocab_of(model: Model) -> int:
    """Tokens that a model knows: the size of its parameters' `vocab` dims.

    Raises:
        InputError: No parameter has one, or they differ.
    """
    sizes = {
        size
        for parameter in model.flat_parameters().values()
        for name, size in zip(parameter.logical_axes, parameter.shape, strict=True)
        if name == "vocab"
    }
    if len(sizes) != 1:
        raise InputError(
            "the model's parameters have "
            + (f"'vocab' dims of {sorted(sizes)}" if sizes else "no 'vocab' dim")
            + ", so that no batch can be made for it; pass batch="
        )
    return sizes.pop()


def _masked(weights: np.ndarray, mask: str, rng: np.random.Generator) -> np.ndarray:
    masked = (weights * MASKS[mask](rng, weights.shape)).astype(np.float32)
    if not masked.any():
        masked[-1, -1] = 1.0
    return masked
