"""Batches that layouts are compared on: random numbers under a mask."""

from __future__ import annotations

import numpy as np

from meshpar import Model
from meshpar.errors import InputError
from meshpar.model.inputs import Input
from meshpar.model.tracing import traced_batch
from meshpar.testing.masks import MASKS

Arrays = dict[str, np.ndarray]


def random_batch(model: Model, examples: int, seq: int, seed: int) -> Arrays:
    """A batch of a model's declared inputs: random numbers, and weights of 1.

    Args:
        model: The model.
        examples: In the batch.
        seq: Size of every dim that the inputs leave open.
        seed: Of the numbers.

    Raises:
        InputError: Nothing says below what an integer must be.
    """
    rng = np.random.default_rng(seed)
    shapes = traced_batch(model, examples, seq)
    return {
        name: _random(rng, name, model.known_inputs[name], shape.shape, model)
        for name, shape in shapes.items()
    }


def _random(
    rng: np.random.Generator,
    name: str,
    declared: Input,
    shape: tuple[int, ...],
    model: Model,
) -> np.ndarray:
    if declared.is_weight:
        return np.ones(shape, np.float32)
    if declared.kind == "int":
        below = declared.below or vocab_of(model, name)
        return rng.integers(0, below, shape, np.int32)
    if declared.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    values = rng.standard_normal(shape, np.float32)
    if declared.kind == "complex":
        return (values + 1j * rng.standard_normal(shape)).astype(np.complex64)
    return values


def steps_of(
    model: Model, batch: Arrays, mask: str, seed: int, num_steps: int
) -> list[Arrays]:
    """A batch a step: the same examples in another order, under another mask.

    A batch without weights has nothing to mask.
    """
    rng = np.random.default_rng(seed)
    weights = [name for name, one in model.known_inputs.items() if one.is_weight]
    batches = []
    for _ in range(num_steps):
        order = rng.permutation(len(next(iter(batch.values()))))
        one = {name: np.asarray(array)[order] for name, array in batch.items()}
        for name in weights:
            if name in one:
                one[name] = _masked(one[name], mask, rng)
        batches.append(one)
    return batches


def vocab_of(model: Model, name: str) -> int:
    """Tokens that a model knows: the size of its parameters' `vocab` dims.

    Args:
        model: The model.
        name: The input that the tokens are for.

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
            + f", so that no batch[{name!r}] can be made for it; pass batch=, or "
            "declare the input with below=",
            key="testing.unknown_vocabulary",
        )
    return sizes.pop()


def _masked(weights: np.ndarray, mask: str, rng: np.random.Generator) -> np.ndarray:
    masked = (weights * MASKS[mask](rng, weights.shape)).astype(np.float32)
    if not masked.any():
        masked.flat[-1] = 1.0
    return masked
