"""Find which arguments a function's results depend on, and by which operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from meshpar.trace.walk import Loop, Program, called_program, programs_in, steps, walk

Numbers = list[Any]
"""Names of operations, and constants, in the order of a program."""


def has_gradient(function: Callable[..., Any], *arguments: Any) -> bool:
    """Return True if the result depends on the arguments in a way with a derivative.

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
    return any(_reached(program, list(map(_is_real, program.jaxpr.invars)), _is_real))


def is_read(function: Callable[..., Any], *arguments: Any) -> bool:
    """Return True if the arguments can change the result, with a derivative or without.

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
    program = jax.make_jaxpr(function)(*arguments)
    return any(_reached(program, [True] * len(program.jaxpr.invars), lambda _: True))


def arguments_read(function: Callable[..., Any], *arguments: Any) -> list[bool]:
    """Return for each array of the arguments, in tree order, if it can change a result.

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
    _, needed = _needed_for(jaxpr, jaxpr.outvars)
    return [var in needed for var in jaxpr.invars]


def passed_on(function: Callable[[dict], dict], arrays: dict[str, Any]) -> list[str]:
    """Return the names of the arrays that come back as they were given.

    Args:
        function: Arrays by name -> arrays by the same names.
        arrays: What it is given.

    Example:
        >>> arrays = {"x": jnp.zeros(3), "y": jnp.zeros(3)}
        >>> passed_on(jax.jit(lambda arrays: {**arrays, "x": arrays["y"]}), arrays)
        ['y']
    """

    def origins(equation: JaxprEqn, given: list[str | None]) -> list[str | None]:
        inner = called_program(equation)
        if inner is None:
            return [None] * len(equation.outvars)
        return walk(inner, given, origins, lambda value: None)

    names = sorted(arrays)
    given: list[str | None] = [*names]
    program = jax.make_jaxpr(function)(arrays)
    found = walk(program, given, origins, lambda value: None)
    return [name for name, origin in zip(names, found, strict=True) if name == origin]


def numbers_in(program: ClosedJaxpr) -> list[Numbers]:
    """Return the operations and constants that each result of a program is made of."""
    jaxpr = program.jaxpr
    values = list(zip(jaxpr.constvars, program.consts, strict=True))
    found = []
    for result in jaxpr.outvars:
        equations, needed = _needed_for(jaxpr, [result])
        numbers = _literals([result])
        for equation in equations:
            numbers += _numbers_at(equation)
        found.append(numbers + [value for var, value in values if var in needed])
    return found


def same_numbers(one: Numbers, other: Numbers) -> bool:
    """Return True if two results have the same operations and constants."""
    return len(one) == len(other) and all(map(_is_same, one, other))


def _reached(
    program: Program, given: Sequence[bool], passes: Callable[[Any], bool]
) -> list[bool]:
    """Return which results some of the arguments reach, through variables that pass."""

    def apply(equation: JaxprEqn, flags: list[bool]) -> list[bool]:
        stops = passes is _is_real and equation.primitive.name == "stop_gradient"
        if stops or not any(flags):
            return [False] * len(equation.outvars)
        results = _through(equation, flags, passes)
        pairs = zip(results, equation.outvars, strict=True)
        return [flag and passes(var) for flag, var in pairs]

    return walk(program, given, apply, lambda value: False)


def _through(
    equation: JaxprEqn, flags: list[bool], passes: Callable[[Any], bool]
) -> list[bool]:
    """Return which results of one operation its flagged operands reach."""
    everything = [True] * len(equation.outvars)
    loop = Loop.parse(equation)
    if loop is not None:
        consts, carried, slices = loop.split(flags)
        carried, made = loop.carried(
            lambda carried: _reached(loop.body, [*consts, *carried, *slices], passes),
            carried,
            lambda one, other: [a or b for a, b in zip(one, other, strict=True)],
        )
        if loop.condition is None:
            return [*carried, *made]
        asked = [*flags[: loop.num_condition_consts], *carried]
        return everything if any(_reached(loop.condition, asked, passes)) else carried
    if equation.primitive.name == "cond":
        if flags[0] and passes(equation.invars[0]):
            return everything
        branches = [_reached(one, flags[1:], passes) for one in programs_in(equation)]
        return [any(results) for results in zip(*branches, strict=True)]
    inner = called_program(equation)
    return everything if inner is None else _reached(inner, flags, passes)


def _is_real(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _needed_for(
    program: Program, results: Sequence[Any]
) -> tuple[list[JaxprEqn], set[Any]]:
    """Return the operations that make some results, last first, and what they read."""
    equations = []
    needed = {atom for atom in results if not isinstance(atom, Literal)}
    for equation in reversed(steps(program)):
        if needed & set(equation.outvars):
            equations.append(equation)
            needed |= {one for one in equation.invars if not isinstance(one, Literal)}
    return equations, needed


def _numbers_at(equation: JaxprEqn) -> Numbers:
    """Return the name of an operation, its constants, and those of programs in it."""
    found = [equation.primitive.name, *_literals(equation.invars)]
    for inner in programs_in(equation):
        found += getattr(inner, "consts", ())
        for step in steps(inner):
            found += _numbers_at(step)
    return found


def _literals(atoms: Sequence[Any]) -> Numbers:
    return [atom.val for atom in atoms if isinstance(atom, Literal)]


def _is_same(one: Any, other: Any) -> bool:
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
