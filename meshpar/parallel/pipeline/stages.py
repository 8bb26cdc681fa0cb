"""Stages: which layers each rank runs, and stacked parameters arranged for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax

from meshpar.errors import InputError
from meshpar.model.contract import BlockGroup, Model, Parameter, is_parameter
from meshpar.schedules import Schedule

NO_LAYER = -1
"""A place that holds no layer, where stages are of uneven size."""


@dataclass(frozen=True, eq=False)
class Arrangement:
    """The layer at every place of every chunk of every rank.

    Args:
        layers: int32 (ranks, chunks, places); `NO_LAYER` where a stage is shorter.
    """

    layers: np.ndarray

    @property
    def order(self) -> tuple[int, ...]:
        """The layers as the stacked parameters hold them, rank by rank."""
        return tuple(self.layers.ravel().tolist())

    @property
    def places(self) -> np.ndarray:
        """The place of each layer, first to last."""
        order = self.layers.ravel()
        empty = np.count_nonzero(order == NO_LAYER)
        return np.argsort(order, kind="stable")[empty:]

    @property
    def padded(self) -> bool:
        """Whether some places hold no layer."""
        return bool((self.layers == NO_LAYER).any())


def arrangement(schedule: Schedule, sizes: Sequence[int]) -> Arrangement:
    """Where every layer lies, by the schedule's placement of stages on ranks."""
    first = np.concatenate([[0], np.cumsum(sizes)])
    shape = (schedule.num_ranks, schedule.num_chunks, max(sizes))
    layers = np.full(shape, NO_LAYER, np.int32)
    for rank, stages in enumerate(schedule.stages_of_rank):
        for chunk, stage in enumerate(stages):
            layers[rank, chunk, : sizes[stage]] = np.arange(
                first[stage], first[stage + 1]
            )
    return Arrangement(layers)


def arranged(model: Model, order: Sequence[int]) -> Model:
    """The model with its stacked parameters in that order of layers.

    Raises:
        InputError: The model has several groups of blocks.
    """
    group = only_group(model)

    def arrange(parameter):
        return replace(parameter, layer_order=tuple(order))

    blocks = jax.tree.map(arrange, model.parameters[group.name], is_leaf=is_parameter)
    return replace(model, parameters={**model.parameters, group.name: blocks})


def in_layer_order(model: Model, tree: Any) -> Any:
    """Undoes `arranged` in arrays that lie as the model's parameters do.

    Args:
        model: An arranged model, or any other.
        tree: Arrays of the shapes of its parameters.

    Returns:
        numpy arrays with layers first to last, and none for places without one.
    """

    def in_order(parameter: Parameter, value: Any) -> np.ndarray:
        value = np.asarray(value)
        if parameter.layer_order is None:
            return value
        layers = np.asarray(parameter.layer_order)
        places = np.argsort(layers, kind="stable")
        return value[places[np.count_nonzero(layers == NO_LAYER) :]]

    return jax.tree.map(
        in_order, model.parameters, jax.device_get(tree), is_leaf=is_parameter
    )


def only_group(model: Model) -> BlockGroup:
    """The model's group of blocks.

    Raises:
        InputError: It has several.
    """
    if len(model.groups) != 1:
        names = ", ".join(group.name for group in model.groups)
        raise InputError(
            f"a pipeline cuts one group of blocks into stages, but the model has "
            f"{len(model.groups)}: {names}; set stage=1 and microbatches=1"
        )
    return model.groups[0]


def cut(tree: Any, num_parts: int) -> Any:
    """The first dim of every array in that many parts."""
    return jax.tree.map(
        lambda value: value.reshape(num_parts, -1, *value.shape[1:]), tree
    )


def merge(tree: Any) -> Any:
    """Undoes `cut`."""
    return jax.tree.map(lambda value: value.reshape(-1, *value.shape[2:]), tree)


def part(tree: Any, index: jax.Array | int) -> Any:
    """One of the parts of every array that was `cut`."""
    return jax.tree.map(
        lambda value: lax.dynamic_index_in_dim(value, index, keepdims=False), tree
    )
