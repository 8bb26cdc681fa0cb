"""Averages of the parameters in an optimizer's state, and states that evaluate them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from meshpar.errors import InputError
from meshpar.model.parameter import Params
from meshpar.train.optimizer_state import inner_state, master_values
from meshpar.train.state import TrainState

if TYPE_CHECKING:
    from meshpar.train.step import TrainStep


class ParameterAverage(NamedTuple):
    """State of `parameter_average`.

    Args:
        count: Updates so far.
        average: The average, which has the parameters' tree and so their layout.
    """

    count: Any  # Which a tuple has as a method.
    average: Params


def parameter_average(decay: float) -> optax.GradientTransformation:
    """Return an optimizer that passes updates on and averages the parameters.

    It comes last in `optax.chain`. After n updates

        average += max(1 - decay, 9 / (n + 10)) * (parameters - average)

    The second term is the larger one at first, so that the initial values are soon
    forgotten. Reference: `tf.train.ExponentialMovingAverage` (`num_updates`).

    Args:
        decay: Share of the average that an update keeps, below 1.
    """

    def init(params: Params) -> ParameterAverage:
        copies = jax.tree.map(lambda value: value.copy(), params)
        return ParameterAverage(jnp.zeros((), jnp.int32), copies)

    def update(
        updates: Params, state: ParameterAverage, params: Params | None = None
    ) -> tuple[Params, ParameterAverage]:
        if params is None:
            raise ValueError("parameter_average needs the parameters: give params=")
        share = jnp.maximum(1 - decay, 9 / (state.count + 10))
        values = optax.apply_updates(params, updates)
        average = optax.incremental_update(values, state.average, share)
        return updates, ParameterAverage(optax.safe_increment(state.count), average)

    return optax.GradientTransformation(init, update)


def averaged_state(step: TrainStep, state: TrainState) -> TrainState:
    """Return a state with averaged parameters, for `evaluate` and `logits`.

    They are the optimizer's moving average (`parameter_average`) or the average of
    `optax.contrib.schedule_free`, laid out as the step's parameters.

    Args:
        step: The step of the state.
        state: It is not donated.

    Raises:
        InputError: The optimizer keeps no average.
    """
    if not has_average(state.opt_state):
        raise InputError(
            "the optimizer keeps no average of the parameters; chain it with "
            "parameter_average(decay), or take optax.contrib.schedule_free",
            key="optimizer.no_average",
        )
    params = _average_program(step)(state.params, state.opt_state)
    return replace(state, params=params)


def has_average(opt_state: Any) -> bool:
    """Return True if an optimizer's state has an average of the parameters."""
    return _find(inner_state(opt_state)) is not None


@functools.lru_cache(maxsize=1)
def _average_program(step: TrainStep) -> Callable[[Params, Any], Params]:
    """Return the program (parameters, optimizer state) -> averaged parameters."""
    on_host = step.layout.optimizer_memory != "device"

    def average(params: Params, opt_state: Any) -> Params:
        if on_host:
            opt_state = jax.device_put(opt_state, jax.memory.Space.Device)
        found, values = _find(inner_state(opt_state)), master_values(params, opt_state)
        if isinstance(found, ParameterAverage):
            values = found.average
        else:
            values = contrib.schedule_free_eval_params(found, values)
        known = dict(jax.tree.leaves_with_path(values))
        return jax.tree.map_with_path(
            lambda path, old: known[path].astype(old.dtype), params
        )

    return jax.jit(average, out_shardings=step.shardings.params)


def _find(opt_state: Any) -> ParameterAverage | contrib.ScheduleFreeState | None:
    kinds = (ParameterAverage, contrib.ScheduleFreeState)
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda one: isinstance(one, kinds))
    return next((one for one in leaves if isinstance(one, kinds)), None)
