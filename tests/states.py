"""States of zeros, laid out as a step's own: what is refused compiles no program."""

from __future__ import annotations

from typing import Any

import jax
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


def begin_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every step begin with zeros, in place of values that a program draws."""
    monkeypatch.setattr(TrainStep, "init", lambda step, seed=0: zeros_of(step))
