"""The operations and constants that each result of a traced program is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from meshpar.model.dependence import needed_for
from meshpar.model.equations import programs_in, without_constants

Numbers = list[Any]
"""Names of operations, and constants, in the order of a program."""


def numbers_in(program: ClosedJaxpr) -> list[Numbers]:
    """What each result of a program is made of, beside its arguments."""
    values = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    return [_numbers_of(program.jaxpr, values, atom) for atom in program.jaxpr.outvars]


def same_numbers(one: Numbers, other: Numbers) -> bool:
    """Whether two programs have the same operations and constants."""
    return len(one) == len(other) and all(map(_same, one, other))


def _numbers_of(jaxpr: Jaxpr, values: dict[Any, Any], result: Any) -> Numbers:
    equations, needed = needed_for(jaxpr, [result])
    found = _literals([result])
    for equation in equations:
        found += _numbers_at(equation)
    return found + [value for var, value in values.items() if var in needed]


def _numbers_at(equation: JaxprEqn) -> Numbers:
    """The name of an operation, its constants, and those of programs inside it."""
    found = [equation.primitive.name, *_literals(equation.invars)]
    for inner in programs_in(equation):
        found += _all_numbers(inner)
    return found


def _literals(atoms: Sequence[Any]) -> Numbers:
    return [atom.val for atom in atoms if hasattr(atom, "val")]


def _all_numbers(program: Any) -> Numbers:
    """The operations and constants of a program inside another."""
    found: Numbers = list(getattr(program, "consts", ()))
    for equation in without_constants(program).eqns:
        found += _numbers_at(equation)
    return found


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, str) or isinstance(other, str):
        return bool(isinstance(one, str) and isinstance(other, str) and one == other)
    if jnp.issubdtype(jnp.result_type(one), jax.dtypes.prng_key):
        one, other = map(jax.random.key_data, (one, other))
    first, second = np.asarray(one), np.asarray(other)
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(np.all((first == second) | ((first != first) & (second != second))))
