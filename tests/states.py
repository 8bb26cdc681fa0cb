"""States of zeros or of random values, laid out as a step's own, without a program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar import TrainState
from meshpar.train.step import TrainStep


def zeros_of(step: Any) -> TrainState:
    """A state that the step takes."""
    return zeros(step.state_shapes, step.shardings)


def zeros(shapes: Any, shardings: Any) -> Any:
    """Arrays of those shapes and dtypes, which lie so."""

    def placed(one: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        return jax.device_put(np.zeros(one.shape, one.dtype), sharding)

    return jax.tree.map(placed, shapes, shardings)


def normal_values(shapes: Any, *, scale: float = 0.3, seed: int = 0) -> Any:
    """Return arrays of NumPy: normal, and zeros where they hold no floats."""
    rng = np.random.default_rng(seed)

    def values(one: jax.ShapeDtypeStruct) -> np.ndarray:
        if not jnp.issubdtype(one.dtype, jnp.floating):
            return np.zeros(one.shape, one.dtype)
        return (scale * rng.standard_normal(one.shape)).astype(one.dtype)

    return jax.tree.map(values, shapes)


def with_parameters(step: Any, params: Any) -> TrainState:
    """Return a state of zeros but for its parameters, given as the step stores them."""
    params = jax.device_put(params, step.shardings.params)
    return replace(zeros_of(step), params=params)


def drawn(step: Any, *, scale: float, steps_done: int = 0) -> TrainState:
    """Return a state of normal values, of the moments too, after so many steps."""
    rng = np.random.default_rng(0)

    def placed(one: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        values = scale * rng.standard_normal(one.shape)
        if not jnp.issubdtype(one.dtype, jnp.floating):
            values = np.abs(values)
        return jax.device_put(values.astype(one.dtype), sharding)

    state = jax.tree.map(placed, step.state_shapes, step.shardings)
    number = jax.device_put(np.int32(steps_done), step.shardings.step)
    return replace(state, step=number)


def begin_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every step begin with zeros, in place of values that a program draws."""
    monkeypatch.setattr(TrainStep, "init", lambda step, seed=0: zeros_of(step))
