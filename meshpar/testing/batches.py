"""Batches that layouts are compared on: random under a mask, or a caller's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from meshpar import Model
from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.model.inputs import BATCH_DIM, Input
from meshpar.model.tracing import traced_batch
from meshpar.parallel.grids.space import splits_tokens
from meshpar.parallel.sequence import sequence_dims
from meshpar.rules.rules import Rules
from meshpar.testing.masks import MASKS

Arrays = dict[str, np.ndarray]


def random_batch(model: Model, examples: int, seq: int, seed: int) -> Arrays:
    """Draw a batch of a model's declared inputs: random numbers, weights of 1.

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
        below = declared.below or vocab_size(model, name)
        return rng.integers(0, below, shape, np.int32)
    if declared.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    values = rng.standard_normal(shape, np.float32)
    if declared.kind == "complex":
        return (values + 1j * rng.standard_normal(shape)).astype(np.complex64)
    return values


def step_batches(
    model: Model, batch: Arrays, mask: str, seed: int, num_steps: int
) -> list[Arrays]:
    """Return a batch for each step: the same examples, reordered and masked anew.

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
                masked = one[name] * MASKS[mask](rng, one[name].shape)
                one[name] = masked.astype(np.float32)
                if not one[name].any():
                    one[name].flat[-1] = 1.0
        batches.append(one)
    return batches


def vocab_size(model: Model, name: str) -> int:
    """Return the size of the vocabulary: of the parameters' `vocab` dims.

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


_KINDS = {"b": "bool", "i": "int", "u": "int", "c": "complex"}
"""Kinds of NumPy's dtypes; any other is `float`."""


def with_batch(model: Model, batch: Mapping[str, np.ndarray]) -> Model:
    """Return the model with its inputs' sizes filled in from a batch.

    Dims with neither a name nor a size have the batch's. Of a model that declares
    nothing, which takes any batch, the inputs are the arrays of this one.

    Args:
        model: As it was given.
        batch: Arrays by name, each with the example first.
    """
    own = undeclared(model, batch)
    if model.inputs is None and not own and batch.keys() >= model.known_inputs.keys():
        return model
    inputs = {
        name: _sized(one, batch.get(name)) for name, one in model.known_inputs.items()
    }
    if model.inputs is None:
        inputs = {name: one for name, one in inputs.items() if name in batch}
        inputs |= {name: _as_it_is(batch[name]) for name in own}
    return replace(model, inputs=inputs)


def undeclared(model: Model, batch: Mapping[str, np.ndarray]) -> list[str]:
    """Return the arrays of a batch that a model without declared inputs may read."""
    if model.inputs is not None:
        return []
    return [name for name in batch if name not in model.known_inputs]


def check_undeclared(
    model: Model, batch: Mapping[str, np.ndarray], layout: Layout, rules: Rules
) -> None:
    """Refuse undeclared arrays if the layout splits their tokens, whose dim is unknown.

    Args:
        model: As it was given.
        batch: Arrays by name.
        layout: What may split sequences.
        rules: Which may let `context` split space instead.

    Raises:
        InputError: As a training step does.
    """
    for name in undeclared(model, batch):
        if splits_tokens(model, layout, rules):
            sequence_dims(model, name, batch[name])
        if layout.stage > 1 and model.per_token and batch[name].ndim > 1:
            model.seq_dim(name)


def _sized(one: Input, array: np.ndarray | None) -> Input:
    if array is None or array.ndim != len(one.logical_axes):
        return one
    axes = zip(one.logical_axes, one.sizes, array.shape, strict=True)
    shape = tuple(own if own or axis else size for axis, own, size in axes)
    return replace(one, shape=shape) if shape != tuple(one.sizes) else one


def _as_it_is(array: np.ndarray) -> Input:
    if not array.ndim:
        return Input((BATCH_DIM,))  # Which `check_batch` refuses.
    return Input(
        (BATCH_DIM, *[None] * (array.ndim - 1)),
        _KINDS.get(array.dtype.kind, "float"),
        shape=(None, *array.shape[1:]),
    )
