"""Stages: which layers each rank runs, and stacked parameters arranged for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from meshpar.model.contract import Model
from meshpar.model.parameter import flat
from meshpar.rules.sharding import path_name
from meshpar.schedules import Schedule

NO_LAYER = -1
"""A place that holds no layer, where stages are of uneven size."""


@dataclass(frozen=True, eq=False)
class Arrangement:
    """The layers of every stage of every rank, group by group.

    Args:
        layers: Of each group int32 (ranks, chunks, places), the layer of that group at
            every place; `NO_LAYER` where a stage has fewer.
        stages: int32 (ranks, chunks), the stage that is each rank's chunk.
    """

    layers: tuple[np.ndarray, ...]
    stages: np.ndarray

    def order(self, group: int) -> tuple[int, ...]:
        """A group's layers as its stacked parameters hold them, rank by rank."""
        return tuple(self.layers[group].ravel().tolist())

    def places(self, group: int) -> np.ndarray:
        """The place of each layer of a group, first to last."""
        return _places(self.layers[group].ravel())

    def padded(self, group: int) -> bool:
        """Whether some places of a group hold no layer."""
        return bool((self.layers[group] == NO_LAYER).any())

    def holds(self, group: int) -> np.ndarray:
        """(ranks, chunks): whether the stage has a layer of the group."""
        return (self.layers[group] != NO_LAYER).any(axis=-1)

    def begins(self, group: int) -> np.ndarray:
        """(ranks, chunks): whether the stage has the first layer of the group."""
        return (self.layers[group] == 0).any(axis=-1)

    def ends(self, group: int) -> np.ndarray:
        """(ranks, chunks): whether the group's is the last layer of the stage."""
        later = [self.holds(at) for at in range(group + 1, len(self.layers))]
        return self.holds(group) & ~np.any([*later, np.zeros_like(self.stages)], axis=0)

    @property
    def crossing(self) -> tuple[int, ...]:
        """The groups whose stream passes from one stage to the next, and the ends'."""
        last = len(self.layers) - 1
        return tuple(
            at
            for at in range(len(self.layers))
            if at in (0, last) or self.ends(at).any()
        )


def arrangement(
    schedule: Schedule, sizes: Sequence[int], group_sizes: Sequence[int]
) -> Arrangement:
    """Where every layer lies, by the schedule's placement of stages on ranks.

    Args:
        schedule: Places the stages.
        sizes: Layers of each stage, first to last.
        group_sizes: Layers of each group of blocks, in order.

    Example:
        >>> from meshpar.schedules import make_schedule
        >>> placed = arrangement(make_schedule("1f1b", 2, 4, 1), (2, 2), (1, 3))
        >>> [one.tolist() for one in placed.layers]
        [[[[0]], [[-1]]], [[[0, -1]], [[1, 2]]]]
    """
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    stages = np.array(schedule.stages_of_rank, np.int32)
    layers, first = [], 0
    for num_layers in group_sizes:
        own = np.clip(bounds - first, 0, num_layers).astype(np.int32)
        starts, stops = own[stages, None], own[stages + 1, None]
        places = np.arange((stops - starts).max(), dtype=np.int32)
        table = starts + places
        layers.append(np.where(table < stops, table, np.int32(NO_LAYER)))
        first += num_layers
    return Arrangement(tuple(layers), stages)


def in_layer_order(model: Model, tree: Any) -> Any:
    """Undoes the arrangement in arrays that lie as the model's parameters do.

    Args:
        model: An arranged model, or any other.
        tree: Arrays at the paths and of the shapes of its parameters, or its state.

    Returns:
        numpy arrays with layers first to last, and none for places without one.
    """
    known = {**flat(model.state), **flat(model.parameters)}

    def in_order(path: tuple, value: Any) -> np.ndarray:
        value = np.asarray(value)
        order = known[path_name(path)].layer_order
        return value if order is None else value[_places(np.asarray(order))]

    return jax.tree.map_with_path(in_order, jax.device_get(tree))


def _places(order: np.ndarray) -> np.ndarray:
    empty = np.count_nonzero(order == NO_LAYER)
    return np.argsort(order, kind="stable")[empty:]


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
