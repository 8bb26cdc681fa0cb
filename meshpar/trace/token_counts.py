"""Find what depends on the number of tokens at hand, by comparing two traces.

A mean over the tokens at hand divides by their number, a constant of the trace like any
other. Only that constant differs in the trace of the same function with fewer tokens at
hand of the same sequence, its twin.
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

from meshpar.trace.token_flow import Flow, Mixed
from meshpar.trace.walk import array_shape, programs_in, steps, without_constants

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
"""Operations that give zeros if all operands are zeros."""
_SIZES = {
    *("shape", "new_sizes", "limit_indices", "slice_sizes", "sizes", "length"),
    "unroll",
}
"""Parameters of operations that follow from shapes, or that change no value."""


@dataclass(frozen=True)
class Twins:
    """A program, and its twin with fewer tokens; None if there is none.

    From the first operation that differs on, operations have no twins.
    """

    program: ClosedJaxpr | Jaxpr
    other: ClosedJaxpr | Jaxpr | None = None

    @property
    def jaxpr(self) -> Jaxpr:
        """The program, with its constants as variables."""
        return without_constants(self.program)

    def twins(self) -> Iterator[JaxprEqn | None]:
        """Yield the twin of each operation."""
        others = [] if self.other is None else steps(self.other)
        same = True
        for at, one in enumerate(steps(self.program)):
            same = same and at < len(others) and one.primitive is others[at].primitive
            yield others[at] if same else None

    @property
    def other_results(self) -> Sequence[Any] | None:
        """The twin's results, if all its operations are the same."""
        if self.other is None:
            return None
        mine, its = (
            [one.primitive for one in steps(program)]
            for program in (self.program, self.other)
        )
        return without_constants(self.other).outvars if mine == its else None

    def constants(self, ratio: tuple[int, int] | None) -> list[Flow]:
        """Return the flows of the arrays that the program closes over.

        Args:
            ratio: Numbers of tokens at hand, of the program and of its twin.
        """
        if not isinstance(self.program, ClosedJaxpr):
            return [Flow()] * len(self.jaxpr.constvars)
        values = self.program.consts
        others = getattr(self.other, "consts", ())
        if len(others) != len(values):
            others = values
        return [
            Flow().as_counted(multiple=_is_multiple(one, other, ratio))
            if _differs(one, other)
            else Flow()
            for one, other in zip(values, others, strict=True)
        ]


def inner_programs(equation: JaxprEqn, twin: JaxprEqn | None) -> list[Twins]:
    """Return the programs that an operation runs, with their twins."""
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
    """Return the flows, counted where the twin has another literal.

    Args:
        atoms: Operands of an operation, or results of a program.
        twins: Those of the twin; None if there is none.
        flows: Flow of each.
        ratio: Numbers of tokens at hand, of the program and of its twin.
    """
    if twins is None or len(twins) != len(atoms):
        return flows
    return [
        flow.as_counted(multiple=_is_multiple(one.val, other.val, ratio))
        if isinstance(one, Literal)
        and isinstance(other, Literal)
        and not np.array_equal(one.val, other.val, equal_nan=True)
        else flow
        for one, other, flow in zip(atoms, twins, flows, strict=True)
    ]


def counts(equation: JaxprEqn, twin: JaxprEqn | None, given: list[Flow]) -> bool:
    """Return True if an operand or parameter depends on the number of tokens."""
    return any(flow.counted for flow in given) or other_numbers(equation, twin)


def without_tokens(
    equation: JaxprEqn,
    twin: JaxprEqn | None,
    given: list[Flow],
    found: list[Flow],
    ratio: tuple[int, int] | None,
) -> list[Flow]:
    """Return the flows of the results of an operation on arrays without tokens.

    Args:
        equation: The operation.
        twin: Its twin; None if there is none.
        given: Flows of its operands.
        found: Flows of its results by its rule.
        ratio: As `counted_literals` takes it.
    """
    counted = any(flow.counted for flow in given)
    if twin is not None:
        shapes, others = _shapes(equation), _shapes(twin)
        if shapes[1] == others[1]:  # else there are more places
            counted |= shapes[0] != others[0] or other_numbers(equation, twin)
    value = _known_value(equation.primitive.name, given)
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
        size, other = (
            math.prod(array_shape(one.invars[0])) for one in (equation, twin)
        )
        if first.value is not None:
            return _is_multiple(size, other, ratio)
        return first.multiple and size == other
    return first.multiple and name in _SAME_VALUE | {"neg"}


def other_numbers(
    equation: JaxprEqn, twin: JaxprEqn | None, names: Sequence[str] | None = None
) -> bool:
    """Return True if a parameter, such as an exponent, differs from the twin's.

    Args:
        equation: The operation.
        twin: Its twin; None if there is none.
        names: Names of the parameters; None for all but sizes.
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
    """Raise if an array of tokens has another dim as long as there are tokens at hand.

    Args:
        equation: The operation.
        twin: Its twin; None if there is none.
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
    """Raise if tokens index a table that has a row for each token at hand."""
    if twin is None or equation.primitive.name != "gather" or flows[0].has_tokens:
        return
    tables = (array_shape(one.invars[0]) for one in (equation, twin))
    if flows[1].has_tokens and len(set(tables)) > 1:
        raise _as_long(equation)


def _as_long(equation: JaxprEqn) -> Mixed:
    return Mixed(
        f"{equation.primitive.name} of tokens with an array that is as long as how "
        "many are at hand; take scope.seq_length(seq)"
    )


def _known_value(name: str, given: list[Flow]) -> Any:
    """Return the one value of all elements of a result; None if it is not known."""
    zeros = [flow.zero for flow in given]
    if name in _SAME_VALUE:
        return given[0].value
    if name == "not" and isinstance(given[0].value, bool):
        return not given[0].value
    gone = name in ("mul", "and") and any(zeros)
    return 0 if gone or (name in _ALSO_ZERO and all(zeros)) else None


def _differs(one: Any, other: Any) -> bool:
    """Return True if two constants of one shape differ in a value."""
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
    """Return the numbers in a parameter; None in place of anything else."""
    if isinstance(value, int | float | np.number):
        return value if value == value else "nan"
    if isinstance(value, tuple | list):
        return [_numbers(one) for one in value]
    return None


def _shapes(equation: JaxprEqn) -> tuple[list[tuple], list[tuple]]:
    """Return the shapes of the operands and of the results."""
    given, found = equation.invars, equation.outvars
    return [array_shape(one) for one in given], [array_shape(one) for one in found]
