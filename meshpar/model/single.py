"""Run a model on one device, layers in a plain loop: the reference of every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.model.block_run import Sums
from meshpar.model.contract import BlockGroup, Model, Stream
from meshpar.model.inputs import Batch
from meshpar.model.parameter import Params
from meshpar.model.scope import Scope


def loss(
    model: Model,
    params: Params,
    batch: Any,
    scope: Scope | None = None,
    state: Params | None = None,
) -> jax.Array:
    """Return the mean loss on one device, without any layout."""
    return loss_and_state(model, params, batch, scope, state)[0]


def loss_and_state(
    model: Model,
    params: Params,
    batch: Any,
    scope: Scope | None = None,
    state: Params | None = None,
) -> tuple[jax.Array, Params]:
    """Return the mean loss, and the state after the step."""
    batch, state = Batch(batch), state or {}
    scope = replace(scope or Scope(), batch=batch)
    x, sums = _run(model, params, batch, scope, state)
    ends, groups = model.split(params)
    of_ends, of_groups = model.split(state)
    found = model.head_sums(ends, x, batch, replace(scope, state=of_ends))
    total, weight_sum = found.loss, found.weight
    for group, layers in zip(model.groups, sums, strict=True):
        total += sum((group.weighted(of_layer) for of_layer in layers), 0.0)
    each = zip(model.groups, groups, of_groups, sums, strict=True)
    new = [_updated(*of_group) for of_group in each]
    state = {**state, **{k: v for k, v in model.join({}, new).items() if k in state}}
    if model.update_ends is not None and found.statistics:
        state = {**state, **model.update_ends(of_ends, found.statistics)}
    return total / weight_sum, state


def forward(
    model: Model,
    params: Params,
    batch: Any,
    scope: Scope | None = None,
    state: Params | None = None,
) -> Stream:
    """Return the last block's output, layers in a plain loop."""
    scope = replace(scope or Scope(), batch=Batch(batch))
    return _run(model, params, Batch(batch), scope, state or {})[0]


def _run(
    model: Model, params: Params, batch: Batch, scope: Scope, state: Params
) -> tuple[Stream, list[list[Sums]]]:
    """Return the last block's output, and the sums of every layer of every group."""
    ends, groups = model.split(params)
    of_ends, of_groups = model.split(state)
    outside = replace(scope, state=of_ends)
    x, sums, layer = model.embed(ends, batch, outside), [], 0
    for group, stacked, states in zip(model.groups, groups, of_groups, strict=True):
        if group.enter is not None:
            x = group.enter(ends, x, outside)
        found = []
        for index in range(group.num_layers):
            at = scope.at_layer(jnp.asarray(layer), _layer(states, index))
            x, of_layer = group.run(_layer(stacked, index), x, at)
            found.append(of_layer)
            layer += 1
        sums.append(found)
    return x, sums


def _layer(tree: Params, index: int) -> Params:
    return jax.tree.map(lambda value: value[index], tree)


def _updated(
    group: BlockGroup, params: Params, state: Params, sums: list[Sums]
) -> Params:
    if not group.changes_state:
        return state
    layers = []
    for index, of_layer in enumerate(sums):
        own = {k: v for k, v in of_layer.items() if k not in group.auxiliary}
        layers.append(group.updated(_layer(params, index), _layer(state, index), own))
    return jax.tree.map(lambda *values: jnp.stack(values), *layers)
