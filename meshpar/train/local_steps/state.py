"""The state of replicas that train by themselves, and what they have in common.

Arrays that differ from replica to replica have a leading dim of all replicas, split
over `data`. A state of one replica is lifted to one of all; the number of steps and the
seed are the same for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.train.layer_order import LayerOrder
from meshpar.train.precision import inner_state, with_inner
from meshpar.train.state import TrainState

REPLICA_AXES = ("data",)
"""The mesh axes along which a layout with local steps has a replica each."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WithOuter:
    """Optimizer state of replicas, beside the outer optimizer's.

    Args:
        inner: Of the replicas' own optimizer, a leading dim of all of them.
        start: Parameters that all replicas last had in common, fp32.
        outer: The outer optimizer's state.
    """

    inner: Any
    start: Any
    outer: Any


def outer_of(state: TrainState) -> WithOuter:
    """What the replicas have in common."""
    return inner_state(state.opt_state)


def of_replicas(state: TrainState) -> TrainState:
    """What the replicas have each of their own, without what is in common."""
    inner = with_inner(state.opt_state, outer_of(state).inner)
    return dataclasses.replace(state, opt_state=inner)


def joined(own: TrainState, start: Any, outer: Any) -> TrainState:
    """Undoes `of_replicas`.

    Args:
        own: What the replicas have each of their own.
        start: Parameters in common.
        outer: The outer optimizer's state.
    """
    common = WithOuter(inner_state(own.opt_state), start, outer)
    opt_state = with_inner(own.opt_state, common)
    return dataclasses.replace(own, opt_state=opt_state)


def lifted(state: TrainState, lift: Callable[[Any], Any]) -> TrainState:
    """A state of one replica, or a tree like it, each array of its own lifted.

    Args:
        state: What one has of its own.
        lift: Array -> an array, or what stands for it, with a dim of all replicas.
    """
    return dataclasses.replace(
        state,
        skipped=lift(state.skipped),
        params=jax.tree.map(lift, state.params),
        opt_state=jax.tree.map(lift, state.opt_state),
        model_state=jax.tree.map(lift, state.model_state),
    )


def repeated(num_replicas: int) -> Callable[[jax.Array], jax.Array]:
    """An array -> the same for every replica."""
    return lambda array: jnp.broadcast_to(array, (num_replicas, *array.shape))


def lifted_sharding(sharding: NamedSharding) -> NamedSharding:
    """The sharding of an array of one replica -> of all of them."""
    return NamedSharding(
        sharding.mesh,
        PartitionSpec(REPLICA_AXES, *sharding.spec),
        memory_kind=sharding.memory_kind,
    )


def lifted_order(order: LayerOrder) -> LayerOrder:
    """Where layers lie in an array of one replica -> in that of all of them."""
    return dataclasses.replace(order, dim=order.dim + 1)


MAPPED: TrainState[int | None] = TrainState(
    step=None,
    seed=None,
    skipped=0,
    params=cast(Any, 0),
    opt_state=0,
    model_state=0,
)
"""The leading dims of `of_replicas`, as `jax.vmap` takes them."""
