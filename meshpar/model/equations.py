"""The equations of a traced program, those of the programs inside it among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
