"""What of a trace depends on how many tokens are at hand, found by tracing it twice.

A mean over the tokens at hand divides by their number: a constant of the trace, like
any other. Beside the trace of the same function with fewer tokens at hand of the same
sequence it is the one that differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from meshpar.trace.token_flow import Flow, Mixed, shape_of
from meshpar.trace.walk import programs_in, without_constants

COUNTED = "of tokens by how many are at hand; take scope.seq_length(seq), or sums alone"
ALIKE = (
    "a sum that no token enters, so that every device adds the same value; multiply it "
    "by n / scope.sequence_sum(n), where n is the number (or the weights) of this "
    "device's tokens"
)
_SAME_VALUE = {
    *("broadcast_in_dim", "reshape", "transpose", "squeeze", "convert_element_type"),
    *("copy", "slice", "stop_gradient", "sharding_constraint"),
}
_ALSO_ZERO = {"add", "add_any", "sub", "neg", "reduce_sum", "concatenate", "select_n"}
"""Operations that give zeros where all they are given are zeros."""
_SIZES = {
    *("shape", "new_sizes", "limit_indices", "slice_sizes", "sizes", "length"),
    "unroll",
}
"""Parameters of operations that shapes say too, or that change no value."""


@dataclass(frozen=True)
class Twins:
    """A program beside the same with fewer tokens; None where there is none.

    Where the two are not the same, operation for operation, the rest has no twins.
    """

    program: ClosedJaxpr | Jaxpr
    other: ClosedJaxpr | Jaxpr | None = None

    @property
    def jaxpr(self) -> Jaxpr:
        """The program, without its constants."""
        return without_constants(self.program)

    def equations(self) -> Iterator[tuple[JaxprEqn, JaxprEqn | None]]:
        """Its operations, each with its twin."""
        twins = [] if self.other is None else without_constants(self.other).eqns
        alike = len(twins) > 0
        for at, one in enumerate(self.jaxpr.eqns):
            alike = alike and at < len(twins) and one.primitive is twins[at].primitive
            yield one, twins[at] if alike else None

    @property
    def other_results(self) -> Sequence[Any] | None:
        """The twin's results, where all its operations are the same."""
        if self.other is None:
            return None
        pairs = self.jaxpr.eqns, without_constants(self.other).eqns
        names = [[one.primitive for one in equations] for equations in pairs]
        return without_constants(self.other).outvars if names[0] == names[1] else None

    def constants(self, ratio: tuple[int, int] | None) -> Iterator[tuple[Any, Flow]]:
        """Flows of the arrays that the program itself has; `ratio` as elsewhere."""
        if not isinstance(self.program, ClosedJaxpr):
            return
        values = self.program.consts
        others = getattr(self.other, "consts", ())
        if len(others) != len(values):
            others = values
        for var, one, other in zip(self.jaxpr.constvars, values, others, strict=True):
            flow = Flow()
            if _other_value(one, other):
                flow = flow.as_counted(multiple=_is_multiple(one, other, ratio))
            yield var, flow


def inner_programs(equation: JaxprEqn, twin: JaxprEqn | None) -> list[Twins]:
    """The programs that an operation runs, such as a loop's body."""
    mine = programs_in(equation)
    its = [] if twin is None else programs_in(twin)
    if len(mine) != len(its):
        return [Twins(one) for one in mine]
    return [Twins(one, other) for one, other in zip(mine, its, strict=True)]


def counted_literals(
    atoms: Sequence[Any],
    twins: Sequence[Any] | None,
    flows: list[Flow],
    ratio: tuple[int, int] | None,
) -> list[Flow]:
    """`flows`, of what is given as numbers that the twin is given others of.

    Args:
        atoms: What is given.
        twins: To the twin; None where there is none.
        flows: Of each.
        ratio: Tokens at hand, and how many the twin has at hand.
    """
    if twins is None or len(twins) != len(atoms):
        return flows
    return [
        flow.as_counted(multiple=_is_multiple(one.val, other.val, ratio))
        if _other_literal(one, other)
        else flow
        for one, other, flow in zip(atoms, twins, flows, strict=True)
    ]


def counts(equation: JaxprEqn, twin: JaxprEqn | None, given: list[Flow]) -> bool:
    """Whether something beside tokens depends on how many are at hand."""
    return any(flow.counted for flow in given) or other_numbers(equation, twin)


def without_tokens(
    equation: JaxprEqn,
    twin: JaxprEqn | None,
    given: list[Flow],
    found: list[Flow],
    ratio: tuple[int, int] | None,
) -> list[Flow]:
    """Flows of an operation's results, none of whose arguments has tokens.

    Args:
        equation: The operation.
        twin: The same with fewer tokens at hand; None if there is none.
        given: Flows of its arguments.
        found: Of its results, as its rule has them.
        ratio: As in `counted_literals`.
    """
    counted = any(flow.counted for flow in given)
    if twin is not None:
        shapes, others = _shapes(equation), _shapes(twin)
        if shapes[1] == others[1]:  # else there are more places
            counted |= shapes[0] != others[0] or other_numbers(equation, twin)
    value = _value(equation.primitive.name, given)
    multiple = counted and _gives_multiple(equation, twin, given, ratio)
    return [
        replace(flow, value=value, counted=counted, multiple=multiple) for flow in found
    ]


def _gives_multiple(
    equation: JaxprEqn,
    twin: JaxprEqn | None,
    given: list[Flow],
    ratio: tuple[int, int] | None,
) -> bool:
    """Return True if an operation on multiples of the token count gives multiples."""
    name, first = equation.primitive.name, given[0]
    if name in ("add", "add_any", "sub"):
        return all(flow.multiple or flow.zero for flow in given)
    if name == "mul":
        return [flow.multiple for flow in given if flow.counted] == [True]
    if name == "div":
        return first.multiple and not given[1].counted
    if name == "reduce_sum" and twin is not None:
        size, other = (math.prod(shape_of(one.invars[0])) for one in (equation, twin))
        if first.value is not None:
            return _is_multiple(size, other, ratio)
        return first.multiple and size == other
    return first.multiple and name in _SAME_VALUE | {"neg"}


def other_numbers(
    equation: JaxprEqn, twin: JaxprEqn | None, names: Sequence[str] | None = None
) -> bool:
    """Whether an operation's own numbers, such as an exponent, are not its twin's.

    Args:
        equation: The operation.
        twin: The same with fewer tokens at hand; None if there is none.
        names: Of its parameters; None for all but sizes.
    """
    if twin is None:
        return False
    if names is None:
        names = [name for name in equation.params if name not in _SIZES]
    return any(
        _numbers(equation.params[name]) != _numbers(twin.params.get(name))
        for name in names
    )


def check_lengths(equation: JaxprEqn, twin: JaxprEqn | None, found: list[Flow]) -> None:
    """Refuses tokens with another dim as long as there are tokens at hand.

    Args:
        equation: The operation.
        twin: The same with fewer tokens at hand; None if there is none.
        found: Flows of its results.
    """
    if twin is None:
        return
    for flow, shape, other in zip(
        found, _shapes(equation)[1], _shapes(twin)[1], strict=True
    ):
        sizes = enumerate(zip(shape, other, strict=False))
        differ = {dim for dim, (one, fewer) in sizes if one != fewer}
        if flow.has_tokens and differ - {flow.dim}:
            raise _as_long(equation)


def check_table(equation: JaxprEqn, twin: JaxprEqn | None, flows: list[Flow]) -> None:
    """Refuses that tokens look up what has as many rows as there are at hand."""
    if twin is None or equation.primitive.name != "gather" or flows[0].has_tokens:
        return
    tables = (shape_of(one.invars[0]) for one in (equation, twin))
    if flows[1].has_tokens and len(set(tables)) > 1:
        raise _as_long(equation)


def _as_long(equation: JaxprEqn) -> Mixed:
    return Mixed(
        f"{equation.primitive.name} of tokens with an array that is as long as how "
        "many are at hand; take scope.seq_length(seq)"
    )


def _value(name: str, given: list[Flow]) -> Any:
    """What all values of a result are, where that is known."""
    zeros = [flow.zero for flow in given]
    if name in _SAME_VALUE:
        return given[0].value
    if name == "not" and isinstance(given[0].value, bool):
        return not given[0].value
    gone = name in ("mul", "and") and any(zeros)
    return 0 if gone or (name in _ALSO_ZERO and all(zeros)) else None


def _other_literal(one: Any, other: Any) -> bool:
    literals = isinstance(one, Literal) and isinstance(other, Literal)
    return literals and not np.array_equal(one.val, other.val, equal_nan=True)


def _other_value(one: Any, other: Any) -> bool:
    """Whether two constants of one shape differ; more places have another shape."""
    arrays = (jax.Array, np.ndarray, np.generic)
    if one is other or not isinstance(one, arrays) or not isinstance(other, arrays):
        return False
    if jnp.issubdtype(one.dtype, jax.dtypes.extended) or one.shape != other.shape:
        return False
    return not np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")


def _is_multiple(one: Any, other: Any, ratio: tuple[int, int] | None) -> bool:
    """Return True if numbers grow with the token count as a multiple of it does."""
    if ratio is None:
        return False
    num, fewer = ratio
    mine, its = (np.asarray(x, np.complex128) for x in (one, other))
    return bool(np.all(mine * fewer == its * num))


def _numbers(value: Any) -> Any:
    """A parameter where it is numbers; else None."""
    if isinstance(value, int | float | np.number):
        return value if value == value else "nan"
    if isinstance(value, tuple | list):
        return [_numbers(one) for one in value]
    return None


def _shapes(equation: JaxprEqn) -> tuple[list[tuple], list[tuple]]:
    """Of what an operation is given, and of its results."""
    given, found = equation.invars, equation.outvars
    return [shape_of(one) for one in given], [shape_of(one) for one in found]
