"""Parameters of each layer by themselves, where a program is to have no loop over them.

A matmul reads weights where they lie, but of a stack it reads a copy of one layer's,
which a step that multiplies each weight once cannot afford.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.model.contract import Model
from meshpar.model.parameter import Params


def layer_by_layer(model: Model, params: Params, num_ranks: int) -> Params:
    """Stacked parameters of groups as a tuple of arrays, one for each place of a rank.

    Args:
        model: Whose parameters they are.
        params: Arrays (ranks x places, ...), or their shapes' arrays.
        num_ranks: Of the pipeline; 1 without.

    Returns:
        The same tree, each array of a group a tuple of arrays (ranks, ...).
    """

    names = [group.name for group in model.groups]
    return {
        name: jax.tree.map(lambda x: layers_apart(x, num_ranks), tree)
        if name in names
        else tree
        for name, tree in params.items()
    }


def layers_apart(stack: jax.Array, num_ranks: int) -> tuple[jax.Array, ...]:
    """(ranks x places, ...) -> an array (ranks, ...) for each place."""
    of_ranks = stack.reshape(num_ranks, -1, *stack.shape[1:])
    return tuple(of_ranks[:, place] for place in range(of_ranks.shape[1]))


def layer_specs(model: Model, specs: Any, params: Params, num_ranks: int) -> Any:
    """The specs of `layer_by_layer`, from those of the stacked parameters.

    Args:
        model: Whose parameters they are.
        specs: A spec for each.
        params: Shapes of the stacked ones.
        num_ranks: As there.
    """

    def cut(spec: PartitionSpec, shape: Any) -> tuple[PartitionSpec, ...]:
        stage = spec[0] if num_ranks > 1 and len(spec) else None
        one = PartitionSpec(stage, *spec[1:])
        return (one,) * (shape.shape[0] // num_ranks)

    names = [group.name for group in model.groups]
    return {
        name: jax.tree.map(cut, tree, params[name], is_leaf=_is_spec)
        if name in names
        else tree
        for name, tree in specs.items()
    }


def of_place(tree: Any, place: int) -> Any:
    """The parameters of this rank's layer at a place, inside `jax.shard_map`."""
    return jax.tree.map(
        lambda arrays: arrays[place][0], tree, is_leaf=lambda x: isinstance(x, tuple)
    )


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


def given_up(
    stack: jax.Array, shardings: tuple[NamedSharding, ...], num_ranks: int
) -> tuple[jax.Array, ...]:
    """The layers of one stack, which is gone then: two are never whole at once.

    Args:
        stack: As `layers_apart` takes it.
        shardings: Of each layer's array.
        num_ranks: Of the pipeline; 1 without.
    """
    found = jax.block_until_ready(
        jax.jit(lambda x: layers_apart(x, num_ranks), out_shardings=tuple(shardings))(
            stack
        )
    )
    stack.delete()
    return found
