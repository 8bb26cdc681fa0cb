"""Optimizers of tables: each updates the rows that a batch touched, and no others.

A row is touched where its id is in the batch, whatever its gradient. What an optimizer
would do to the others (momentum that goes on, weight decay) is not done, so that a step
costs what its batch does; which dense optimizer that equals, each says.
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
"""A learning rate, or updates done so far -> it, as optax's schedules are."""

Slots = dict[str, jax.Array]

ROWS = "rows"
"""Name of a table's rows beside those of their state."""


@dataclass(frozen=True)
class Slot:
    """One kind of state of each row.

    Args:
        of_row: Whether it is a number a row; else a number a value.
        first: What it starts from.
    """

    of_row: bool
    first: float = 0.0


class TableOptimizer(Protocol):
    """What updates rows."""

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
        """New rows and state.

        Args:
            rows: fp32 (rows, dim), or a device's part of each.
            gradients: Theirs, summed over the global batch.
            slots: State of those rows.
            count: Updates done before.
            mean_square: Of each row of `gradients`, over all its values.
        """


@dataclass(frozen=True)
class SGD:
    """`row - rate * gradient`: equals dense SGD without momentum.

    Args:
        rate: The learning rate, or a schedule of it.
    """

    rate: Rate

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    @property
    def slots(self) -> Mapping[str, Slot]:
        """None."""
        return {}

    def update(
        self, rows: jax.Array, gradients: jax.Array, slots: Slots, **of_step: Any
    ) -> tuple[jax.Array, Slots]:
        """As `TableOptimizer` says."""
        return rows - _rate(self.rate, of_step["count"]) * gradients, slots


@dataclass(frozen=True)
class RowwiseAdagrad:
    """Adagrad with one accumulator a row (Mudigere et al. 2022, section 4.1.4).

        sum = sum + mean(gradient^2);  row - rate * gradient / (sqrt(sum) + epsilon)

    It equals the dense form, for a row that has no gradient changes nothing there.

    Args:
        rate: The learning rate, or a schedule of it.
        epsilon: Added to the root.
        first: What the sums start from.
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
        return {"sum": Slot(of_row=True, first=self.first)}

    def update(
        self, rows: jax.Array, gradients: jax.Array, slots: Slots, **of_step: Any
    ) -> tuple[jax.Array, Slots]:
        """As `TableOptimizer` says."""
        total = slots["sum"] + of_step["mean_square"](gradients)
        scale = _rate(self.rate, of_step["count"]) / (jnp.sqrt(total) + self.epsilon)
        return rows - scale[:, None] * gradients, {"sum": total}


@dataclass(frozen=True)
class LazyAdam:
    """Adam whose moments wait until their row is touched again.

    It equals dense Adam (Kingma and Ba 2015; `optax.adam`) whose untouched rows keep
    value and moments at every step: `where(touched, new, old)` of all three. The bias
    correction counts all steps, not the row's own.

    Args:
        rate: The learning rate, or a schedule of it.
        b1: How much of the first moment stays.
        b2: How much of the second.
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
        return {"mu": Slot(of_row=False), "nu": Slot(of_row=False)}

    def update(
        self, rows: jax.Array, gradients: jax.Array, slots: Slots, **of_step: Any
    ) -> tuple[jax.Array, Slots]:
        """As `TableOptimizer` says."""
        done = of_step["count"].astype(jnp.float32) + 1
        mu = self.b1 * slots["mu"] + (1 - self.b1) * gradients
        nu = self.b2 * slots["nu"] + (1 - self.b2) * gradients * gradients
        first, second = mu / (1 - self.b1**done), nu / (1 - self.b2**done)
        step = first / (jnp.sqrt(second) + self.epsilon)
        rows = rows - _rate(self.rate, of_step["count"]) * step
        return rows, {"mu": mu, "nu": nu}


def array_structs(
    optimizer: TableOptimizer, rows: int, dim: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of an array of rows, and of each of their state."""
    shapes = {ROWS: (rows, dim)} | {
        name: (rows,) if slot.of_row else (rows, dim)
        for name, slot in optimizer.slots.items()
    }
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
    }


OPTIMIZERS = (SGD, RowwiseAdagrad, LazyAdam)


def check_optimizer(optimizer: Any) -> None:
    """Refuses any other optimizer.

    Raises:
        InputError: It is none of `OPTIMIZERS`.
    """
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
