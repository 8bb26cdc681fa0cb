"""Arrays of all layers: operations on each layer, sums over those that exist."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.train.optimizer.flow import Choice, Value, run
from meshpar.train.optimizer.program import MONOIDS, Operation, Program


@dataclass(frozen=True)
class Layers:
    """The domain of arrays, stacked over the places of layers where they have them.

    Args:
        filled: Path of each parameter with layers -> for each place of its leading dim
            whether it holds one.
    """

    filled: Mapping[str, np.ndarray]

    def constant(self, value: Any) -> Any:
        return value

    def apply(self, operation: Operation, operands: Sequence[Value]) -> list[Any]:
        contents = [operand.content for operand in operands]
        dims = [0 if operand.owner in self.filled else None for operand in operands]
        if 0 not in dims:
            return operation.bind(*contents)
        return jax.vmap(operation.bind, dims)(*contents)

    def total(self, name: str, terms: Sequence[Value]) -> jax.Array:
        each = (self._summed(name, term) for term in terms)
        return functools.reduce(MONOIDS[name], each)

    def choose(self, choice: Choice) -> list[jax.Array]:
        def taken(branch: Program, *contents: Any) -> list[jax.Array]:
            values = [
                Value(one.owner, content)
                for one, content in zip(choice.inputs, contents, strict=True)
            ]
            results = run(branch, values, self)
            return [
                self.stacked(owner, value)
                for owner, value in zip(choice.owners, results, strict=True)
            ]

        branches = [functools.partial(taken, branch) for branch in choice.branches]
        index = jnp.int32(choice.index.content)
        return lax.switch(index, branches, *(one.content for one in choice.inputs))

    def stacked(self, owner: str | None, value: Value) -> jax.Array:
        """The array of a value, once for each place where its owner has layers."""
        if owner is None or owner not in self.filled or value.owner == owner:
            return jnp.asarray(value.content)
        shape = (len(self.filled[owner]), *jnp.shape(value.content))
        return jnp.broadcast_to(value.content, shape)

    def without_empty(self, owner: str | None, array: jax.Array) -> jax.Array:
        """The array, 0 at places without a layer."""
        if owner is None or owner not in self.filled:
            return array
        return _masked(array, self.filled[owner], 0)

    def _summed(self, name: str, term: Value) -> jax.Array:
        if term.owner is None or term.owner not in self.filled:
            return jnp.asarray(term.content)
        neutral = _neutral(name, term.content.dtype)
        array = _masked(term.content, self.filled[term.owner], neutral)
        return lax.reduce(array, neutral, MONOIDS[name], (0,))


def _masked(array: jax.Array, filled: np.ndarray, neutral: Any) -> jax.Array:
    if filled.all():
        return array
    here = filled.reshape(-1, *(1,) * (array.ndim - 1))
    return jnp.where(here, array, neutral)


def _neutral(name: str, dtype: Any) -> np.ndarray:
    """What changes no sum of that primitive."""
    if name in ("add", "add_any", "or"):
        return np.zeros((), dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.asarray(name in ("and", "min"))
    if name == "and":
        return ~np.zeros((), dtype)
    sign = -1 if name == "max" else 1
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(sign * np.inf, dtype)
    limits = jnp.iinfo(dtype)
    return np.asarray(limits.min if name == "max" else limits.max, dtype)
