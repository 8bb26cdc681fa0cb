"""The state of a training run: all that the next step depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.errors import InputError
from meshpar.model import Model, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Step number, seed, parameters and optimizer state, each a global array.

    Args:
        step: Steps done.
        seed: What initial values and dropout derive from.
        params: Nested dict, fp32.
        opt_state: As the optimizer made it.
    """

    step: jax.Array
    seed: jax.Array
    params: Params
    opt_state: Any


def initial_state(
    model: Model, optimizer: optax.GradientTransformation, seed: jax.Array
) -> TrainState:
    """The state before the first step."""
    params = model.init(seed)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        seed=jnp.asarray(seed, jnp.uint32),
        params=params,
        opt_state=optimizer.init(params),
    )


def state_shardings(
    state: TrainState,
    param_shardings: Params,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> TrainState:
    """A sharding for every array of the state; optimizer state follows its parameter.

    Args:
        state: The state or its shapes.
        param_shardings: Sharding of each parameter.
        optimizer: What made `state.opt_state`.
        mesh: The mesh.

    Raises:
        InputError: Optimizer state of a parameter has another shape than it.
    """
    replicated = NamedSharding(mesh, PartitionSpec())

    def follow(value: jax.Array, param: jax.Array, sharding: NamedSharding) -> Any:
        if value.shape != param.shape:
            raise InputError(
                f"optimizer state of shape {value.shape} belongs to a parameter of "
                f"shape {param.shape}, so it cannot take that parameter's layout; use "
                "an optimizer whose state has the parameters' shapes"
            )
        return sharding

    opt_shardings = optax.tree_utils.tree_map_params(
        optimizer,
        follow,
        state.opt_state,
        state.params,
        param_shardings,
        transform_non_params=lambda _: replicated,
    )
    return TrainState(
        step=replicated,
        seed=replicated,
        params=param_shardings,
        opt_state=opt_shardings,
    )
