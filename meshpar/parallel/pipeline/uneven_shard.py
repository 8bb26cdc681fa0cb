"""Uneven parts of a batch: parts of `data` that run different numbers of microbatches.

Every device holds as many rows of the batch as any other, so that arrays are even. The
rows, token ids and the like, are gathered over `data` once a step, and each device runs
its own microbatches of them, in a loop that ends when it has. Nothing may cross `data`
in that loop, where devices of other parts may be past it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from meshpar.collectives import asked
from meshpar.errors import InputError
from meshpar.trace.operations import operation_line
from meshpar.trace.walk import (
    collective_axes,
    equations,
    expect_iterations,
)

_AXIS = "data"


@dataclass(frozen=True)
class UnevenShard:
    """The microbatches of this device, among those of all parts of `data`.

    Args:
        counts: Microbatches of each part of `data`.
    """

    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        """Microbatches of all parts."""
        return sum(self.counts)

    @property
    def count(self) -> jax.Array:
        """Microbatches of this device."""
        return self._own(self.counts)

    @property
    def first(self) -> jax.Array:
        """Number of its first microbatch."""
        return self._own(np.cumsum([0, *self.counts[:-1]]))

    def whole(self, arrays: Any) -> Any:
        """Return the rows of all parts of `data`: one all-gather of all arrays.

        Of n parts with P bytes together a device receives P (n-1)/n.
        """
        with asked("uneven_rows"):
            return lax.all_gather(arrays, _AXIS, tiled=True)

    def scan(self, tick: Callable[..., tuple], state: Any, rows: Any) -> Any:
        """Return the state after as many ticks as this device has microbatches.

        Args:
            tick: (state, row) -> (state, None), as of `lax.scan`.
            state: Before the first.
            rows: Arrays with a row for each tick, of the largest part.

        Raises:
            InputError: A tick communicates over `data`.
        """
        count, rows = self.count, jax.tree.map(jnp.asarray, rows)
        most, mean = max(self.counts), self.total / len(self.counts)

        def run(at: jax.Array, state: Any) -> Any:
            return tick(state, jax.tree.map(lambda row: row[at], rows))[0]

        program, shape = jax.make_jaxpr(run, return_shape=True)(jnp.int32(0), state)
        _check_is_own(program)
        treedef, traced = jax.tree.structure(shape), jaxpr_as_fun(program)

        def body(carried: tuple) -> tuple:
            at, state = carried
            leaves = traced(at, *jax.tree.leaves(state))
            return at + 1, treedef.unflatten(leaves)

        def goes_on(carried: tuple) -> jax.Array:
            at = expect_iterations(carried[0], mean)
            # As the audit reads loops that end early.
            return (at < most) & (at < count)

        return lax.while_loop(goes_on, body, (jnp.int32(0), state))[1]

    def _own(self, each: Any) -> jax.Array:
        return jnp.asarray(each, jnp.int32)[lax.axis_index(_AXIS)]


def _check_is_own(program: Any) -> None:
    for equation in equations(program):
        if _AXIS in collective_axes(equation):
            raise InputError(
                f"data_splits: {operation_line(equation)} communicates over 'data' in "
                "every microbatch, of which parts of 'data' run different numbers; "
                "leave data_splits out, or what is shared over 'data' (statistics of "
                "the batch, zero_axes)",
                key="step.shards_communicate",
            )
