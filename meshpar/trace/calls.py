"""Traced programs without the calls inside them, and programs made of operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from meshpar.trace.primitives import CALLS
from meshpar.trace.walk import programs_in, steps, without_constants

_INLINED = CALLS - {"shard_map", "custom_partitioning", "composite"}


def without_calls(jaxpr: Jaxpr) -> Jaxpr:
    """Return the same program without calls; names of scopes stay."""
    equations: list[JaxprEqn] = []
    known: dict[Var, Any] = {}

    def take_in(jaxpr: Jaxpr, known: dict[Var, Any], scope: Any) -> list[Any]:
        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else known.get(atom, atom)

        for equation in steps(jaxpr):
            given = [read(atom) for atom in equation.invars]
            source = equation.source_info
            if scope is not None:
                source = source.replace(name_stack=scope + source.name_stack)
            called = _called(equation)
            if called is not None:
                operands = dict(zip(called.invars, given, strict=True))
                results = take_in(called, operands, source.name_stack)
            else:
                results = [Var(var.aval) for var in equation.outvars]
                equations.append(
                    equation.replace(invars=given, outvars=results, source_info=source)
                )
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    results = take_in(jaxpr, known, None)
    return program_like(jaxpr, jaxpr.invars, results, equations)


def _called(equation: JaxprEqn) -> Jaxpr | None:
    """Return the program that an equation calls on its operands."""
    if equation.primitive.name not in _INLINED:
        return None
    programs = programs_in(equation)
    if len(programs) != 1:
        return None
    (program,) = programs
    inner = without_constants(program)
    if inner.constvars or len(inner.invars) != len(equation.invars):
        return None
    return inner


def program_like(
    like: Jaxpr,
    arguments: Sequence[Var],
    results: Sequence[Any],
    equations: Sequence[JaxprEqn],
) -> Jaxpr:
    """Return a program of the same constants and other operations.

    Args:
        like: The other program.
        arguments: Its arguments.
        results: Variables or literals.
        equations: Its operations, in order.
    """
    effects = frozenset().union(*(equation.effects for equation in equations))
    return Jaxpr(
        like.constvars,
        [*arguments],
        [*results],
        [*equations],
        effects=effects,
        debug_info=like.debug_info,
    )
