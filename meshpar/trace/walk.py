"""The equations of a traced program, those of the programs inside it among them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def equations(program: ClosedJaxpr | Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation, an outer one before those inside it."""
    for equation in without_constants(program).eqns:
        yield equation
        for inner in programs_in(equation):
            yield from equations(inner)


def programs_in(equation: JaxprEqn) -> list[ClosedJaxpr | Jaxpr]:
    """The programs that an equation holds, such as a loop's body."""
    leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program)
    return [one for one in leaves if _is_program(one)]


def without_constants(program: ClosedJaxpr | Jaxpr) -> Jaxpr:
    """A program of which the arrays that it has itself are variables."""
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def collective_axes(equation: JaxprEqn) -> tuple[str, ...]:
    """The manual mesh axes that an equation is a collective over; () for any other."""
    if equation.primitive.name == "axis_index":
        return ()
    params: Mapping[str, Any] = equation.params
    axes = params.get("axes", params.get("axis_name", ()))
    axes = (axes,) if isinstance(axes, str) else axes
    return tuple(axis for axis in axes if isinstance(axis, str))


def _is_program(node: Any) -> bool:
    return isinstance(node, ClosedJaxpr | Jaxpr)


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """Constants of all iterations, and values that one hands to the next.

    JAX 0.12 has no `num_consts` and `num_carry` of a scan. An array of which an
    iteration takes or makes a slice has a dim more outside; all others are constants,
    which come first, and carries.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def add(a, b, c):
        ...     return jax.lax.scan(lambda a, b: (a + b * c, a), a, b)
        >>> program = jax.make_jaxpr(add)(1.0, jnp.arange(3.0), 2.0)
        >>> scan_counts(program.eqns[-1])
        (1, 1)
    """
    inner = equation.params["jaxpr"].jaxpr
    sliced = _with_a_dim_more(equation.invars, inner.invars)
    carries = len(equation.outvars) - _with_a_dim_more(equation.outvars, inner.outvars)
    return len(equation.invars) - sliced - carries, carries


def _with_a_dim_more(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(one.aval.ndim > other.aval.ndim for one, other in pairs)


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
