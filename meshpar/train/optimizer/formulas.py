"""Names of what computes each value: equal names, equal values.

The name of a result is a digest of its operation and its operands' names, so that two
programs whose outputs have the same names compute the same numbers, but for the order
in which sums over several parameters are taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from meshpar.train.optimizer.flow import Choice, Value
from meshpar.train.optimizer.program import Operation

NUM_COPIES = 2
"""Layers that a stacked parameter is taken to have."""


@dataclass(frozen=True)
class Formulas:
    """The domain of names: a tuple of one for each layer, or one name.

    Args:
        stacked: Paths of the parameters that have layers.
    """

    stacked: frozenset[str]

    def constant(self, value: Any) -> str:
        return _digest(_described(value))

    def apply(self, operation: Operation, operands: Sequence[Value]) -> list[Any]:
        what = operation.name, _described(operation.params)
        contents = [operand.content for operand in operands]
        if not any(operand.owner in self.stacked for operand in operands):
            return _names(len(operation.outputs), *what, *contents)
        copies = [
            _names(len(operation.outputs), *what, *(_of_copy(x, i) for x in contents))
            for i in range(NUM_COPIES)
        ]
        return list(zip(*copies, strict=True))

    def total(self, name: str, terms: Sequence[Value]) -> str:
        names: list[str] = []
        for term in terms:
            names += (
                term.content if isinstance(term.content, tuple) else (term.content,)
            )
        return _digest("total", name, *sorted(names))

    def choose(self, choice: Choice) -> list[Any]:
        index = choice.index.content
        results = []
        for owner, values in choice.results(self):
            copies = tuple(
                _digest("cond", index, *(_of_copy(x.content, i) for x in values))
                for i in range(NUM_COPIES)
            )
            results.append(copies if owner in self.stacked else copies[0])
        return results


def of_all_copies(content: Any) -> tuple[str, ...]:
    """The name for each layer of what may be the same for all."""
    return tuple(_of_copy(content, i) for i in range(NUM_COPIES))


def _of_copy(content: Any, copy: int) -> str:
    return content[copy] if isinstance(content, tuple) else content


def _names(num_results: int, *what: str) -> list[str]:
    return [_digest(*what, str(at)) for at in range(num_results)]


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def _described(value: Any) -> str:
    """A text that is the same for the same parameter of a primitive, or constant."""
    if isinstance(value, dict):
        return _described(tuple(sorted(value.items())))
    if isinstance(value, tuple | list):
        return f"({','.join(_described(one) for one in value)})"
    if isinstance(value, ClosedJaxpr):
        return f"{value.jaxpr} {_described(value.consts)}"
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        return f"{value.dtype} {_described(jax.random.key_data(value))}"
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        content = hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
        return f"{array.dtype} {array.shape} {content}"
    return repr(value)
