"""Optimizers of tables: each updates the rows that a batch touched, and no others.

A row is touched if its id is in the batch, whatever its gradient. Untouched rows do not
change (no further momentum, no weight decay), so that a step's cost depends on its
batch alone; each optimizer says which dense optimizer it equals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from meshpar.errors import InputError

Rate = float | Callable[[jax.Array], jax.Array | float]
"""A learning rate, or a schedule as optax's: updates done so far -> learning rate."""

Slots = dict[str, jax.Array]

ROWS = "rows"
"""Name of a table's rows among its arrays."""


@dataclass(frozen=True)
class Slot:
    """One kind of state of each row.

    Args:
        per_row: True for one number a row, False for one a value.
        first: Initial value.
    """

    per_row: bool
    first: float = 0.0


class TableOptimizer(Protocol):
    """Optimizer of rows."""

    @property
    def slots(self) -> Mapping[str, Slot]:
        """State of each row, by name."""

    def update(
        self,
        rows: jax.Array,
        gradients: jax.Array,
        slots: Slots,
        *,
        count: jax.Array,
        mean_square: Callable[[jax.Array], jax.Array],
    ) -> tuple[jax.Array, Slots]:
        """Return new rows and state.

        Args:
            rows: fp32 (rows, dim), or a device's part of each.
            gradients: Gradients of the rows, summed over the global batch.
            slots: State of those rows.
            count: Updates done before.
            mean_square: Mean square of each row of `gradients`, over all its values.
        """


@dataclass(frozen=True)
class SGD:
    """SGD, `row - rate * gradient`; it equals dense SGD without momentum.

    Args:
        rate: The learning rate, or a schedule of it.
    """

    rate: Rate

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    @property
    def slots(self) -> Mapping[str, Slot]:
        """No state."""
        return {}

    def update(
        self, rows: jax.Array, gradients: jax.Array, slots: Slots, **context: Any
    ) -> tuple[jax.Array, Slots]:
        """Return new rows and state; see `TableOptimizer`."""
        return rows - _rate(self.rate, context["count"]) * gradients, slots


@dataclass(frozen=True)
class RowwiseAdagrad:
    """Adagrad with one accumulator a row (Mudigere et al. 2022, section 4.1.4).

        sum = sum + mean(gradient^2);  row - rate * gradient / (sqrt(sum) + epsilon)

    It equals the dense form, in which a row without a gradient does not change either.

    Args:
        rate: The learning rate, or a schedule of it.
        epsilon: Added to the root.
        first: Initial value of the sums.
    """

    rate: Rate
    epsilon: float = 1e-8
    first: float = 0.0

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        _check_number("epsilon", self.epsilon)
        _check_number("first", self.first)

    @property
    def slots(self) -> Mapping[str, Slot]:
        """The sum of mean squares, a number a row."""
        return {"sum": Slot(per_row=True, first=self.first)}

    def update(
        self, rows: jax.Array, gradients: jax.Array, slots: Slots, **context: Any
    ) -> tuple[jax.Array, Slots]:
        """Return new rows and state; see `TableOptimizer`."""
        total = slots["sum"] + context["mean_square"](gradients)
        scale = _rate(self.rate, context["count"]) / (jnp.sqrt(total) + self.epsilon)
        return rows - scale[:, None] * gradients, {"sum": total}


@dataclass(frozen=True)
class LazyAdam:
    """Adam whose moments change only when their row is touched.

    It equals dense Adam (Kingma and Ba 2015; `optax.adam`) whose untouched rows keep
    value and moments at every step: `where(touched, new, old)` of all three. The bias
    correction counts all steps, not the row's own.

    Args:
        rate: The learning rate, or a schedule of it.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        epsilon: Added to the root.
    """

    rate: Rate
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        _check_number("epsilon", self.epsilon)
        for name in ("b1", "b2"):
            _check_number(name, getattr(self, name), below=1.0)

    @property
    def slots(self) -> Mapping[str, Slot]:
        """Both moments, a number a value."""
        return {"mu": Slot(per_row=False), "nu": Slot(per_row=False)}

    def update(
        self, rows: jax.Array, gradients: jax.Array, slots: Slots, **context: Any
    ) -> tuple[jax.Array, Slots]:
        """Return new rows and state; see `TableOptimizer`."""
        done = context["count"].astype(jnp.float32) + 1
        mu = self.b1 * slots["mu"] + (1 - self.b1) * gradients
        nu = self.b2 * slots["nu"] + (1 - self.b2) * gradients * gradients
        first, second = mu / (1 - self.b1**done), nu / (1 - self.b2**done)
        step = first / (jnp.sqrt(second) + self.epsilon)
        rows = rows - _rate(self.rate, context["count"]) * step
        return rows, {"mu": mu, "nu": nu}


def array_structs(
    optimizer: TableOptimizer, rows: int, dim: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of an array of rows, and of each array of their state."""
    shapes = {ROWS: (rows, dim)} | {
        name: (rows,) if slot.per_row else (rows, dim)
        for name, slot in optimizer.slots.items()
    }
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
    }


OPTIMIZERS = (SGD, RowwiseAdagrad, LazyAdam)


def check_optimizer(optimizer: Any) -> None:
    """Raise InputError unless the optimizer is one of `OPTIMIZERS`."""
    if not isinstance(optimizer, OPTIMIZERS):
        names = ", ".join(f"meshpar.tables.{kind.__name__}" for kind in OPTIMIZERS)
        raise InputError(
            f"tables cannot be updated by {type(optimizer).__name__}: only touched "
            f"rows are, in place; give one of {names}",
            key="tables.unsupported_optimizer",
        )


def _check_rate(rate: Rate) -> None:
    if not callable(rate):
        _check_number("rate", rate)


def _check_number(name: str, value: float, below: float = math.inf) -> None:
    if not (isinstance(value, Real) and 0 <= value < below):
        under = "" if below == math.inf else f" and below {below:g}"
        raise InputError(
            f"{name}={value!r}: must be a finite number of at least 0{under}",
            key="optimizer.number_out_of_range",
        )


def _rate(rate: Rate, count: jax.Array) -> jax.Array | float:
    return rate(count) if callable(rate) else rate
