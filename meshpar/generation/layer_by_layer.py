"""Parameters of each layer by themselves, where a program is to have no loop over them.

A matmul reads weights where they lie, but of a stack it reads a copy of one layer's,
which a step that multiplies each weight once cannot afford.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.model.contract import Model
from meshpar.model.parameter import Parameter, Params


def layer_by_layer(model: Model, params: Params, num_ranks: int) -> Params:
    """Stacked parameters of groups as a tuple of arrays, one for each place of a rank.

    Args:
        model: Whose parameters they are.
        params: Arrays (ranks x places, ...), or their shapes' arrays.
        num_ranks: Of the pipeline; 1 without.

    Returns:
        The same tree, each array of a group a tuple of arrays (ranks, ...).
    """
    ends, groups = model.split(params)
    return model.join(ends, jax.tree.map(lambda x: layers_apart(x, num_ranks), groups))


def layers_apart(stack: jax.Array, num_ranks: int) -> tuple[jax.Array, ...]:
    """(ranks x places, ...) -> an array (ranks, ...) for each place."""
    of_ranks = stack.reshape(num_ranks, -1, *stack.shape[1:])
    return tuple(of_ranks[:, place] for place in range(of_ranks.shape[1]))


def layer_specs(model: Model, specs: Any, num_ranks: int) -> Any:
    """The specs of `layer_by_layer`, from those of the stacked parameters.

    Args:
        model: Whose parameters they are.
        specs: A spec for each.
        num_ranks: As there.
    """

    def cut(spec: PartitionSpec, parameter: Parameter) -> tuple[PartitionSpec, ...]:
        stage = spec[0] if num_ranks > 1 and len(spec) else None
        one = PartitionSpec(stage, *spec[1:])
        return (one,) * (len(parameter.places) // num_ranks)

    (ends, groups), (_, declared) = model.split(specs), model.split(model.parameters)
    return model.join(ends, jax.tree.map(cut, groups, declared))


def given_up(model: Model, params: Params, shardings: Any, num_ranks: int) -> Params:
    """`layer_by_layer`; each stack is gone then: two are never whole at once.

    Args:
        model: Whose parameters they are.
        params: As there, arrays.
        shardings: Of the result, one for each layer's array.
        num_ranks: As there.
    """

    def cut(stack: jax.Array, own: tuple[NamedSharding, ...]) -> tuple[jax.Array, ...]:
        apart = jax.jit(lambda x: layers_apart(x, num_ranks), out_shardings=own)
        found = jax.block_until_ready(apart(stack))
        stack.delete()
        return found

    (ends, groups), (_, of_layers) = model.split(params), model.split(shardings)
    return model.join(ends, jax.tree.map(cut, groups, of_layers))


def of_place(tree: Any, place: int) -> Any:
    """The parameters of this rank's layer at a place, inside `jax.shard_map`."""
    return jax.tree.map(
        lambda arrays: arrays[place][0], tree, is_leaf=lambda x: isinstance(x, tuple)
    )
