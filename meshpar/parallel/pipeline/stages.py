"""Stages: which layers each rank runs, and stacked parameters arranged for it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.errors import InputError
from meshpar.layout import BY_COST, Layout
from meshpar.model.contract import BlockGroup, Model
from meshpar.model.parameter import flat
from meshpar.model.tracing import (
    one_layer_shapes,
    one_layer_state,
    traced_batch,
    traced_streams,
    tracing,
    tracing_scope,
)
from meshpar.parallel.sizes import COST_TOKENS
from meshpar.rules.sharding import path_name
from meshpar.schedules import OwnSchedule, Schedule, chosen_schedule
from meshpar.schedules.stage_splits import split_by_cost, stage_sizes
from meshpar.trace.costs import Operand, matmul_flops

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
        """Return a group's layers in the order of its stacked parameters, by rank."""
        return tuple(self.layers[group].ravel().tolist())

    def places(self, group: int) -> np.ndarray:
        """Return the place of each layer of a group, first to last."""
        return _places(self.layers[group].ravel())

    def padded(self, group: int) -> bool:
        """Return True if some places of a group hold no layer."""
        return bool((self.layers[group] == NO_LAYER).any())

    def holds(self, group: int) -> np.ndarray:
        """Return (ranks, chunks): True if the stage has a layer of the group."""
        return (self.layers[group] != NO_LAYER).any(axis=-1)

    def begins(self, group: int) -> np.ndarray:
        """Return (ranks, chunks): True if the stage has the group's first layer."""
        return (self.layers[group] == 0).any(axis=-1)

    def ends(self, group: int) -> np.ndarray:
        """Return (ranks, chunks): True if the stage's last layer is the group's."""
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
    """Place every layer, by the schedule's placement of stages on ranks.

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


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A model arranged for the stages of a layout.

    Args:
        model: Its stacked parameters lie rank by rank.
        schedule: What every rank does.
        arrangement: Which layers every rank has.
        stage_layers: How many layers each stage has, first to last.
        data_counts: Microbatches of each part of `data`, if they differ; the schedule
            has as many as the largest.
    """

    model: Model
    schedule: Schedule
    arrangement: Arrangement
    stage_layers: tuple[int, ...]
    data_counts: tuple[int, ...] = ()


def pipeline_for(
    model: Model, layout: Layout, schedule: OwnSchedule | None = None
) -> Pipeline:
    """Return the model arranged for a layout's stages, and its schedule.

    Args:
        model: The model.
        layout: Its stages, microbatches, chunks and splits.
        schedule: Instead of the one that the layout names.

    Raises:
        InputError: More stages than layers, splits that do not fit, or a schedule that
            is wrong or cannot have those sizes.
    """
    sizes = stage_layers(model, layout)
    chosen = chosen_schedule(
        layout.schedule if schedule is None else schedule,
        num_ranks=layout.stage,
        num_microbatches=max((layout.microbatches, *layout.data_splits)),
        chunks=layout.chunks,
        max_pending_w=layout.max_pending_w,
    )
    placed = arrangement(chosen, sizes, [group.num_layers for group in model.groups])
    orders = {group.name: placed.order(at) for at, group in enumerate(model.groups)}
    return Pipeline(
        model=model.arranged(orders),
        schedule=chosen,
        arrangement=placed,
        stage_layers=sizes,
        data_counts=layout.data_counts if layout.data_splits else (),
    )


def stage_layers(model: Model, layout: Layout) -> tuple[int, ...]:
    """Return the number of layers of each stage of a layout, first to last.

    Raises:
        InputError: More stages than layers, splits that do not fit, or costs that
            cannot be measured.
    """
    if not model.has_blocks and layout.stage * layout.chunks > 1:
        raise InputError(
            f"stage={layout.stage}, chunks={layout.chunks}: stages are cut between "
            "blocks, but from_loss was given none; name the path of a list of equal "
            "blocks, such as blocks='layers'",
            key="model.no_blocks_for_stages",
        )
    even = stage_sizes(model.num_layers, layout.stage, layout.chunks)
    if layout.splits != BY_COST:
        return stage_sizes(model.num_layers, layout.stage, layout.chunks, layout.splits)
    return split_by_cost(_layer_costs(model), len(even))


def with_costs(model: Model, costs: Sequence[float], layout: Layout) -> Model:
    """Return the model with the given costs of its layers.

    Raises:
        InputError: The layout does not split by cost, or there are not as many costs as
            layers.
    """
    if layout.splits != BY_COST:
        raise InputError(
            f"layer_costs are given, but layout {str(layout)!r} does not split by "
            "them; say splits=cost, or leave them out",
            key="layout.unused_layer_costs",
        )
    if len(costs) != model.num_layers:
        raise InputError(
            f"the model has {model.num_layers} layers, but {len(costs)} costs; give "
            "one a layer",
            key="model.wrong_number_of_costs",
        )
    groups = []
    for group, first in zip(model.groups, model.first_layers, strict=True):
        own = tuple(costs[first : first + group.num_layers])
        groups.append(replace(group, costs=own))
    return replace(model, groups=tuple(groups))


def arranged_for(model: Model, layout: Layout) -> Model:
    """Return the model as a step stores it: its layers in the order of the stages."""
    return pipeline_for(model, layout).model if layout.runs_in_ticks else model


def layer_costs(model: Model, *, seq: int = COST_TOKENS) -> tuple[float, ...]:
    """Return the cost of every layer: declared, or its matmul FLOPs on one example.

    Nothing runs; declared costs count if every group of blocks has them. A block is one
    function of all its layers; layers differ where it branches on `scope.layer`
    (`lax.cond`, `lax.switch`): that index is known for each layer, and with it the
    branch. `Workload.layer_costs` counts the same by arithmetic.

    Args:
        model: The model, its groups of blocks in order.
        seq: Tokens of the example; as long as in training where layers differ in how
            they attend.

    Raises:
        InputError: The model cannot be traced on tokens, targets and weights alone, or
            has matmuls in a `while_loop` that tells no number of iterations.

    Example:
        >>> from meshpar.models.presets import build
        >>> costs = layer_costs(build("test", layers=3))
        >>> len(costs), len(set(costs))
        (3, 1)
    """
    declared = [group.costs for group in model.groups]
    if all(costs is not None for costs in declared):
        return tuple(cost for costs in declared for cost in costs or ())
    problem = f"no layer's cost can be measured on a batch of shape {(1, seq)}"
    with tracing(problem, "give layer_costs="):
        streams = traced_streams(model, 1, seq)
        (_, params), (_, states) = one_layer_shapes(model), one_layer_state(model)
        batch = traced_batch(model, 1, seq)
        return tuple(
            cost
            for group, param, stream, state in zip(
                model.groups, params, streams, states, strict=True
            )
            for cost in _group_costs(group, (param, stream, state, batch))
        )


def _group_costs(group: BlockGroup, given: tuple[Any, ...]) -> list[float]:
    def call(layer: jax.Array, params: Any, x: Any, state: Any, batch: Any) -> Any:
        return group.run(params, x, tracing_scope(batch, state, layer=layer))

    layer = jax.ShapeDtypeStruct((), jnp.int32)
    program = jax.make_jaxpr(call)(layer, *given)
    unknown = [Operand()] * (len(program.jaxpr.invars) - 1)
    return [
        matmul_flops(program, [Operand(jnp.int32(index)), *unknown]).total
        for index in range(group.num_layers)
    ]


_layer_costs = functools.lru_cache(maxsize=16)(layer_costs)


def in_layer_order(model: Model, tree: Any) -> Any:
    """Undo the arrangement in arrays that lie as the model's parameters do.

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
    """Cut the first dim of every array into that many parts."""
    return jax.tree.map(
        lambda value: value.reshape(num_parts, -1, *value.shape[1:]), tree
    )


def merge(tree: Any) -> Any:
    """Undo `cut`."""
    return jax.tree.map(lambda value: value.reshape(-1, *value.shape[2:]), tree)


def part(tree: Any, index: jax.Array | int) -> Any:
    """Return one of the parts of every array that was `cut`."""
    return jax.tree.map(
        lambda value: lax.dynamic_index_in_dim(value, index, keepdims=False), tree
    )
