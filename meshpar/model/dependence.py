"""What of its arguments a function's result depends on, read from its trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from meshpar.model.scan_counts import scan_counts


def has_gradient(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether the result depends on the arguments in a way that has a derivative.

    What goes through integers, comparisons or `lax.stop_gradient` has none.

    Args:
        function: Arrays -> an array, or a tree of them.
        arguments: Arrays or their shapes.

    Example:
        >>> x = jax.ShapeDtypeStruct((3,), jnp.float32)
        >>> has_gradient(lambda x: jnp.sum(x), x)
        True
        >>> has_gradient(lambda x: jnp.sum(jnp.ones_like(x) * (x > 0)), x)
        False
    """
    program = jax.make_jaxpr(function)(*arguments)
    reached = [_is_real(var) for var in program.jaxpr.invars]
    return any(_reached(program.jaxpr, reached))


def arguments_read(function: Callable[..., Any], *arguments: Any) -> list[bool]:
    """Whether each array of the arguments, in tree order, may change the result.

    An operation with several results takes all its operands for each of them.

    Args:
        function: Arrays -> an array, or a tree of them.
        arguments: Arrays or their shapes.

    Example:
        >>> x = jax.ShapeDtypeStruct((3,), jnp.float32)
        >>> arguments_read(lambda x, y, z: (2 * x, jnp.zeros_like(y)), x, x, x)
        [True, False, False]
    """
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    needed = {atom for atom in jaxpr.outvars if not hasattr(atom, "val")}
    for equation in reversed(jaxpr.eqns):
        if needed & set(equation.outvars):
            needed |= {atom for atom in equation.invars if not hasattr(atom, "val")}
    return [var in needed for var in jaxpr.invars]


def _reached(jaxpr: Jaxpr, arguments: Sequence[bool]) -> list[bool]:
    """Which results some of the arguments reach."""
    known = {var for var, flag in zip(jaxpr.invars, arguments, strict=True) if flag}
    for equation in jaxpr.eqns:
        flags = [not hasattr(atom, "val") and atom in known for atom in equation.invars]
        if not any(flags) or equation.primitive.name == "stop_gradient":
            continue
        found = _through(equation, flags)
        known |= {
            var
            for var, flag in zip(equation.outvars, found, strict=True)
            if flag and _is_real(var)
        }
    return [not hasattr(atom, "val") and atom in known for atom in jaxpr.outvars]


def _through(equation: Any, flags: list[bool]) -> list[bool]:
    """Which results of one operation its flagged operands reach."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _through_scan(equation, flags)
    if name == "cond":
        branches = [_reached(one.jaxpr, flags[1:]) for one in params["branches"]]
        return [any(of_result) for of_result in zip(*branches, strict=True)]
    inner = [
        getattr(one, "jaxpr", one)
        for one in jax.tree.leaves(list(params.values()), is_leaf=_is_program)
        if _is_program(one)
    ]
    fits = [
        one
        for one in inner
        if len(one.invars) == len(flags) and len(one.outvars) == len(equation.outvars)
    ]
    if name != "while" and len(fits) == 1:
        return _reached(fits[0], flags)
    return [True] * len(equation.outvars)


def _through_scan(equation: Any, flags: list[bool]) -> list[bool]:
    body = equation.params["jaxpr"].jaxpr
    num_consts, num_carry = scan_counts(equation)
    consts, carry = flags[:num_consts], flags[num_consts : num_consts + num_carry]
    xs = flags[num_consts + num_carry :]
    while True:
        found = _reached(body, [*consts, *carry, *xs])
        more = [a or b for a, b in zip(carry, found[:num_carry], strict=True)]
        if more == carry:
            return [*more, *found[num_carry:]]
        carry = more


def _is_program(node: Any) -> bool:
    return isinstance(node, ClosedJaxpr | Jaxpr)


def _is_real(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)
