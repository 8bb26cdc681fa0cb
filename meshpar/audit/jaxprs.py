"""Programs inside of programs, as JAX traces them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn


def inner_jaxprs(equation: JaxprEqn) -> Iterator[tuple[Jaxpr, int]]:
    """The programs inside of an equation, and how often each runs."""
    times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
    for value in equation.params.values():
        inner = getattr(value, "jaxpr", value)
        if isinstance(inner, Jaxpr):
            yield inner, times


def array_shape(atom: Any) -> tuple[int, ...]:
    """Shape of a variable or literal that is known to be an array."""
    return atom.aval.shape


def array_dtype(atom: Any) -> Any:
    """Dtype of a variable or literal that is known to be an array."""
    return atom.aval.dtype


def dot_flops(equation: JaxprEqn) -> float:
    """FLOPs of a dot, or of a ragged one: two of each value that it multiplies."""
    left, out = array_shape(equation.invars[0]), array_shape(equation.outvars[0])
    numbers: Any = equation.params.get(
        "dimension_numbers", equation.params.get("ragged_dot_dimension_numbers")
    )
    numbers = getattr(numbers, "dot_dimension_numbers", numbers)
    (contracted, _), _ = numbers
    return 2.0 * math.prod(out) * math.prod(left[dim] for dim in contracted)
