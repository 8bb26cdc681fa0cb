"""Read the sizes of undeclared inputs from a caller's batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from meshpar.layout import Layout
from meshpar.model.contract import Model
from meshpar.model.inputs import BATCH_DIM, Input
from meshpar.parallel.grids.space import splits_tokens
from meshpar.parallel.sequence import sequence_dims
from meshpar.rules.rules import Rules

_KINDS = {"b": "bool", "i": "int", "u": "int", "c": "complex"}
"""Kinds of NumPy's dtypes; any other is `float`."""


def with_batch(model: Model, batch: Mapping[str, np.ndarray]) -> Model:
    """The model with its inputs' sizes, where only a batch has them.

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
    """Names of arrays that a model which declares nothing reads, perhaps."""
    if model.inputs is not None:
        return []
    return [name for name in batch if name not in model.known_inputs]


def check_undeclared(
    model: Model, batch: Mapping[str, np.ndarray], layout: Layout, rules: Rules
) -> None:
    """Refuses arrays of which nothing says the dim of the tokens that a layout splits.

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
