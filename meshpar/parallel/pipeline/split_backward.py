"""Cut a backward in two programs: for the input's gradient, and for the weights'.

The first makes the results wanted first, and a stash of what the second needs of it.
Neither does a matmul, a collective or a kernel that the other does: the second computes
only cheap operations again, where that makes the stash smaller (a minimum cut of the
program's graph). Loops are cut in their bodies, barriers by operand; a loop with a
data-dependent number of trips, a branch and a `shard_map` stay whole.

Reference: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2, for B =
I + W (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)

from meshpar.parallel.pipeline.minimum_stash import atom_shape, minimum_stash, read_by
from meshpar.trace.calls import program_like, without_calls
from meshpar.trace.walk import Loop, steps, without_constants


@dataclass(frozen=True)
class SplitProgram:
    """The two programs of `split_program`.

    Args:
        first: Arguments -> the results wanted first, and the stash.
        second: Arguments and stash -> the other results.
        stash: Shapes and dtypes of the stash.
        second_reads: For each argument, whether `second` reads it.
    """

    first: ClosedJaxpr
    second: ClosedJaxpr
    stash: tuple[jax.ShapeDtypeStruct, ...]
    second_reads: tuple[bool, ...]

    def run_first(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the results wanted first, and the stash."""
        results = jaxpr_as_fun(self.first)(*arguments)
        num_wanted = len(results) - len(self.stash)
        return results[:num_wanted], results[num_wanted:]

    def run_second(self, arguments: Sequence[Any], stash: Sequence[Any]) -> list[Any]:
        """Return the other results; arguments that it does not read may be anything."""
        return jaxpr_as_fun(self.second)(*arguments, *stash)


def split_program(
    program: ClosedJaxpr, wanted: Sequence[bool], kept: Sequence[bool]
) -> SplitProgram:
    """Cut a program in two.

    Args:
        program: As `jax.make_jaxpr` traces it.
        wanted: For each result, True if the first program makes it.
        kept: For each argument, True if the second program is given it again. What it
            needs of the others is in the stash.

    Example:
        >>> import jax.numpy as jnp
        >>> def backward(w, x, dy):
        ...     return dy @ w.T, x.T @ dy
        >>> w, x = jnp.ones((2, 3)), jnp.ones((5, 2))
        >>> program = jax.make_jaxpr(backward)(w, x, x @ w)
        >>> cut = split_program(program, [True, False], [True, True, False])
        >>> [array.shape for array in cut.stash], cut.second_reads
        ([(5, 3)], (False, True, False))
    """
    flat = without_calls(without_constants(program))
    free = {*flat.constvars, *(v for v, k in zip(flat.invars, kept, strict=True) if k)}
    first, second, stash = _cut(flat, wanted, free)
    read = read_by(steps(second), second.outvars)
    return SplitProgram(
        ClosedJaxpr(first, program.consts),
        ClosedJaxpr(second, program.consts),
        tuple(map(atom_shape, stash)),
        tuple(var in read and var in free for var in flat.invars),
    )


def _parsed_loop(equation: JaxprEqn) -> tuple[Loop, Jaxpr] | None:
    """Return a loop that can be cut, and its body without calls."""
    if equation.primitive.name != "scan":
        return None
    loop = Loop.parse(equation)
    assert loop is not None
    body = without_constants(loop.body)
    return None if body.constvars else (loop, without_calls(body))


_BARRIER = "optimization_barrier"

_Needs = tuple[list[bool], list[bool]]
"""For each result of an operation, and each operand, whether it is needed."""


def _needs(jaxpr: Jaxpr, wanted: Sequence[bool]) -> tuple[list[_Needs | None], set]:
    """Return what each operation is needed for, and all variables that are read."""
    read = {
        var
        for var, is_wanted in zip(jaxpr.outvars, wanted, strict=True)
        if is_wanted and isinstance(var, Var)
    }
    needs: list[_Needs | None] = [None] * len(steps(jaxpr))
    for at, equation in reversed([*enumerate(steps(jaxpr))]):
        used = [var in read for var in equation.outvars]
        if not any(used):
            continue
        operands = [True] * len(equation.invars)
        looped = _parsed_loop(equation)
        if looped is not None:
            used, operands = _loop_needs(*looped, used)
        elif equation.primitive.name == _BARRIER:
            operands = used
        needs[at] = used, operands
        read |= {
            atom
            for atom, is_read in zip(equation.invars, operands, strict=True)
            if is_read and isinstance(atom, Var)
        }
    return needs, read


def _loop_needs(loop: Loop, body: Jaxpr, used: Sequence[bool]) -> _Needs:
    """Return which carries and outputs of a loop are needed, and which operands."""
    consts, carry = loop.num_consts, loop.num_carried
    carried, stacked = list(used[:carry]), list(used[carry:])
    while True:
        _, read = _needs(body, carried + stacked)
        operands = [var in read for var in body.invars]
        more = [
            one or other
            for one, other in zip(
                carried, operands[consts : consts + carry], strict=True
            )
        ]
        if more == carried:
            operands[consts : consts + carry] = carried
            return carried + stacked, operands
        carried = more


def _cut(
    jaxpr: Jaxpr, wanted: Sequence[bool], free: set[Var]
) -> tuple[Jaxpr, Jaxpr, list[Var]]:
    """Return both programs, and the variables of the stash.

    Args:
        jaxpr: Without calls.
        wanted: For each result, True if the first program makes it.
        free: Arguments that the second program has too.
    """
    of_first, _ = _needs(jaxpr, wanted)
    of_second, _ = _needs(jaxpr, [not one for one in wanted])
    first: list[JaxprEqn] = []
    second: list[JaxprEqn] = []
    for equation, early, late in zip(steps(jaxpr), of_first, of_second, strict=True):
        halves = _halves(equation, early, late)
        first += halves[0]
        second += halves[1]
    results: tuple[list[Any], list[Any]] = [], []
    for atom, is_wanted in zip(jaxpr.outvars, wanted, strict=True):
        results[not is_wanted].append(atom)
    stash = minimum_stash(jaxpr, first, second, results[1], free)
    again = _computed_again(first, second, results[1], stash)
    # An argument that the second program is not given again comes in the stash, if at
    # all; another variable takes its place.
    arguments = [var if var in free else Var(var.aval) for var in jaxpr.invars]
    return (
        program_like(jaxpr, jaxpr.invars, [*results[0], *stash], first),
        program_like(jaxpr, [*arguments, *stash], results[1], [*again, *second]),
        stash,
    )


def _halves(
    equation: JaxprEqn, early: _Needs | None, late: _Needs | None
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Return what both programs do of an operation, given what they need of it."""
    unused = [False] * len(equation.outvars)
    in_first = early[0] if early else unused
    only_late = [
        one and not other
        for one, other in zip(late[0] if late else unused, in_first, strict=True)
    ]
    if equation.primitive.name == _BARRIER:
        return _split_barrier(equation, in_first), _split_barrier(equation, only_late)
    if early is None:
        if late is None:
            return [equation] if equation.effects else [], []
        return [], _pruned(equation, late)
    looped = _parsed_loop(equation)
    if looped is None or not any(only_late):
        return _pruned(equation, early), []
    return _cut_loop(equation, *looped, in_first, only_late)


def _pruned(equation: JaxprEqn, needs: _Needs) -> list[JaxprEqn]:
    """Return an operation; of a loop, only the part that makes the needed results."""
    looped = _parsed_loop(equation)
    results, operands = needs
    if looped is None or all(operands):
        return [equation]
    unused = [False] * len(results)
    return _cut_loop(equation, *looped, results, unused)[0]


def _split_barrier(barrier: JaxprEqn, which: Sequence[bool]) -> list[JaxprEqn]:
    """Return a barrier of some of the operands of another."""
    if not any(which):
        return []
    invars, outvars = (_picked(of, which) for of in (barrier.invars, barrier.outvars))
    return [barrier.replace(invars=invars, outvars=outvars)]


def _computed_again(
    first: Sequence[JaxprEqn],
    second: Sequence[JaxprEqn],
    results: Sequence[Any],
    stash: Iterable[Var],
) -> list[JaxprEqn]:
    """Return the cheap operations of the first program that the second does too."""
    known = {*stash}
    read = read_by(second, results)
    again = []
    for equation in reversed(first):
        if any(var in read and var not in known for var in equation.outvars):
            again.append(equation)
            read |= {atom for atom in equation.invars if isinstance(atom, Var)}
    return again[::-1]


def _cut_loop(
    equation: JaxprEqn,
    loop: Loop,
    body: Jaxpr,
    early: Sequence[bool],
    late: Sequence[bool],
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Return the loops of both programs.

    Args:
        equation: The loop.
        loop: How it takes its operands.
        body: Its body without calls.
        early: For each of its carries and outputs, whether the first program needs it.
        late: Whether only the second does.
    """
    needed = [one or other for one, other in zip(early, late, strict=True)]
    consts, carry, xs = loop.split(body.invars)
    carries = [
        [var for var, of in zip(carry, which, strict=False) if of]
        for which in (early, late)
    ]
    wanted = [out for out, of in zip(body.outvars, needed, strict=True) if of]
    first, second, stash = _cut(
        program_like(body, body.invars, wanted, steps(body)),
        [one for one, of in zip(early, needed, strict=True) if of],
        {*consts, *carries[1], *xs},
    )
    stacked = [Var(_stacked(var.aval, loop.length)) for var in stash]
    given_consts, given_carry, given_xs = loop.split(equation.invars)
    halves = []
    for jaxpr, which, carried, more, kept in (
        (first, early, carries[0], [], stacked),
        (second, late, carries[1], stash, []),
    ):
        arguments = consts, carried, [*xs, *more]
        operands = (
            given_consts,
            [atom for atom, of in zip(given_carry, which, strict=False) if of],
            [*given_xs, *(stacked if more else ())],
        )
        made = [var for var, of in zip(equation.outvars, which, strict=True) if of]
        read = read_by(steps(jaxpr), jaxpr.outvars)
        consts_read, xs_read = ([var in read for var in arguments[at]] for at in (0, 2))
        halves.append(
            _scan(
                equation,
                program_like(
                    jaxpr,
                    [
                        *_picked(arguments[0], consts_read),
                        *carried,
                        *_picked(arguments[2], xs_read),
                    ],
                    jaxpr.outvars,
                    steps(jaxpr),
                ),
                (
                    _picked(operands[0], consts_read),
                    operands[1],
                    _picked(operands[2], xs_read),
                ),
                [*made, *kept],
            )
        )
    return halves[0], halves[1]


def _picked(atoms: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [atom for atom, of in zip(atoms, which, strict=True) if of]


def _stacked(aval: Any, length: int | None) -> Any:
    return aval.update(shape=(length, *aval.shape))


def _scan(
    like: JaxprEqn,
    body: Jaxpr,
    operands: tuple[Sequence[Any], Sequence[Any], Sequence[Any]],
    results: Sequence[Var],
) -> list[JaxprEqn]:
    """Return a loop like another, of another body.

    JAX traces it: how a loop's equation counts its operands differs by version.

    Args:
        like: The loop whose length and direction it has.
        body: Constants, carries and slices -> carries and slices.
        operands: Its constants, carries and what it runs over.
        results: Variables of its results.
    """
    run, num_carry = jaxpr_as_fun(ClosedJaxpr(body, ())), len(operands[1])

    def looped(consts: list, carry: list, xs: list) -> list:
        def one(carry: list, x: list) -> tuple[list, list]:
            made = run(*consts, *carry, *x)
            return made[:num_carry], made[num_carry:]

        params = {name: like.params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = jax.lax.scan(one, carry, xs, **params)
        # A carry that never changes would be the operand itself, and no new variable.
        return jax.lax.optimization_barrier([*carry, *ys])

    flat = [atom for part in operands for atom in part]
    shapes = [[*map(atom_shape, part)] for part in operands]
    traced = jax.make_jaxpr(looped)(*shapes).jaxpr
    known = dict(zip(traced.invars, flat, strict=True))
    known |= dict(zip(traced.outvars, results, strict=True))
    equations = []
    for equation in steps(traced):
        made = [known.setdefault(var, Var(var.aval)) for var in equation.outvars]
        given = [
            atom if isinstance(atom, Literal) else known[atom]
            for atom in equation.invars
        ]
        equations.append(
            equation.replace(invars=given, outvars=made, source_info=like.source_info)
        )
    return equations
