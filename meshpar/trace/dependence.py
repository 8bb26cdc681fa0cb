"""What of its arguments a function's result depends on, read from its trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from meshpar.trace.walk import programs_in, scan_counts, without_constants


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
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return any(_reached(jaxpr, [_is_real(var) for var in jaxpr.invars], _is_real))


def is_read(function: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether the arguments can change the result, with a derivative or without.

    Args:
        function: Arrays -> an array, or a tree of them.
        arguments: Arrays or their shapes.

    Example:
        >>> x = jax.ShapeDtypeStruct((3,), jnp.float32)
        >>> is_read(lambda x: jnp.sum(jax.lax.stop_gradient(x)), x)
        True
        >>> is_read(lambda x: jnp.float32(x.size), x)
        False
    """
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return any(_reached(jaxpr, [True] * len(jaxpr.invars), lambda var: True))


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
    _, needed = needed_for(jaxpr, jaxpr.outvars)
    return [var in needed for var in jaxpr.invars]


def needed_for(jaxpr: Jaxpr, results: Sequence[Any]) -> tuple[list[JaxprEqn], set[Any]]:
    """The operations that make some results, the last first, and all that they read.

    Args:
        jaxpr: A program.
        results: Some of its results.
    """
    equations = []
    needed = {atom for atom in results if not hasattr(atom, "val")}
    for equation in reversed(jaxpr.eqns):
        if needed & set(equation.outvars):
            equations.append(equation)
            needed |= {atom for atom in equation.invars if not hasattr(atom, "val")}
    return equations, needed


def passed_on(function: Callable[[dict], dict], arrays: dict[str, Any]) -> list[str]:
    """The names of the arrays that come back as they were given.

    Args:
        function: Arrays by name -> arrays by the same names.
        arrays: What it is given.

    Example:
        >>> arrays = {"x": jnp.zeros(3), "y": jnp.zeros(3)}
        >>> passed_on(jax.jit(lambda arrays: {**arrays, "x": arrays["y"]}), arrays)
        ['y']
    """
    jaxpr = jax.make_jaxpr(function)(arrays).jaxpr
    origins = enumerate(_origins(jaxpr))
    return [
        name
        for name, (at, origin) in zip(sorted(arrays), origins, strict=True)
        if at == origin
    ]


def _origins(jaxpr: Jaxpr) -> list[int | None]:
    """Of each result, the argument that it is."""
    known = {var: at for at, var in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        inner = _inner(equation)
        if inner is None or equation.primitive.name in ("scan", "while"):
            continue
        for var, at in zip(equation.outvars, _origins(inner), strict=True):
            atom = None if at is None else equation.invars[at]
            if atom is not None and not hasattr(atom, "val") and atom in known:
                known[var] = known[atom]
    return [None if hasattr(one, "val") else known.get(one) for one in jaxpr.outvars]


def _reached(
    jaxpr: Jaxpr, arguments: Sequence[bool], passes: Callable[[Any], bool]
) -> list[bool]:
    """Which results some of the arguments reach, through variables that `passes`."""
    known = {var for var, flag in zip(jaxpr.invars, arguments, strict=True) if flag}
    for equation in jaxpr.eqns:
        flags = [not hasattr(atom, "val") and atom in known for atom in equation.invars]
        stops = passes is _is_real and equation.primitive.name == "stop_gradient"
        if stops or not any(flags):
            continue
        found = _through(equation, flags, passes)
        known |= {
            var
            for var, flag in zip(equation.outvars, found, strict=True)
            if flag and passes(var)
        }
    return [not hasattr(atom, "val") and atom in known for atom in jaxpr.outvars]


def _through(
    equation: Any, flags: list[bool], passes: Callable[[Any], bool]
) -> list[bool]:
    """Which results of one operation its flagged operands reach."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _through_scan(equation, flags, passes)
    if name == "cond" and not (flags[0] and passes(equation.invars[0])):
        branches = [
            _reached(one.jaxpr, flags[1:], passes) for one in params["branches"]
        ]
        return [any(of_result) for of_result in zip(*branches, strict=True)]
    inner = _inner(equation)
    if name not in ("cond", "while") and inner is not None:
        return _reached(inner, flags, passes)
    return [True] * len(equation.outvars)


def _inner(equation: Any) -> Jaxpr | None:
    """The one program of an operation that has its operands and results."""
    inner = map(without_constants, programs_in(equation))
    fits = [
        one
        for one in inner
        if len(one.invars) == len(equation.invars)
        and len(one.outvars) == len(equation.outvars)
    ]
    return fits[0] if len(fits) == 1 else None


def _through_scan(
    equation: Any, flags: list[bool], passes: Callable[[Any], bool]
) -> list[bool]:
    body = equation.params["jaxpr"].jaxpr
    num_consts, num_carry = scan_counts(equation)
    consts, carry = flags[:num_consts], flags[num_consts : num_consts + num_carry]
    xs = flags[num_consts + num_carry :]
    while True:
        found = _reached(body, [*consts, *carry, *xs], passes)
        more = [a or b for a, b in zip(carry, found[:num_carry], strict=True)]
        if more == carry:
            return [*more, *found[num_carry:]]
        carry = more


def _is_real(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


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
